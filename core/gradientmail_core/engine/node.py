"""A node: its lease, its listing, its snapshots and one task for each fragment, on one event loop.

Everything a node does is a mailbox call or a wait on the injected clock, so the same code runs in production
and, deterministically, in simulation. A node enters in state ``j``, trains in ``t``, leaves in ``d`` and is gone
with a last beat ``x``. If any task fails for good, the failure is kept and told to the training thread; nothing
is retried blindly and nothing more is published.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from gradientmail_core.algorithms.diloco import DiLoCo, diloco_from
from gradientmail_core.algorithms.shares import as_seen
from gradientmail_core.clock import TimeOver
from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.fragment import Fragment
from gradientmail_core.engine.joining import Found, checked, create_run, find_run, listed_leases, load_heads
from gradientmail_core.engine.learner import Commit, Learner, LearnerState, Message, Snapshot
from gradientmail_core.engine.lease import Lease
from gradientmail_core.engine.life import Life
from gradientmail_core.engine.office import Office
from gradientmail_core.engine.polling import own_upload_after
from gradientmail_core.engine.precautions import guarded, nature_of, refuse_overwriting
from gradientmail_core.engine.publishing import encoded_snapshot
from gradientmail_core.engine.residuals import LeftOver
from gradientmail_core.engine.resuming import counted
from gradientmail_core.engine.roles import Role, state_of
from gradientmail_core.engine.run import Board, Host, Run
from gradientmail_core.errors import RunMismatch
from gradientmail_core.events import (
    BatchShareChanged,
    RunJoined,
    RunWaited,
    SessionEnded,
    SnapshotPublished,
    SnapshotRefused,
    SyncerElected,
)
from gradientmail_core.mailbox.base import whole_listing
from gradientmail_core.protocol.keys import LIVE, DeltaKey, LeaseState, parse_live
from gradientmail_core.protocol.records import StoreClass
from gradientmail_core.tensors.buffers import wire_codec
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Schema

WAITING_POLL_SECONDS = 1.0
WAITING_REPORT_SECONDS = 10.0
WAITING_REPORT_GROWTH = 2.0
SETTLING_POLL_SECONDS = 0.05


class Node(Life):
    """One process's part in a run. All coroutines run on the loop that calls :meth:`enter`."""

    def __init__(
        self,
        host: Host,
        settings: DiLoCo | None,
        *,
        min_nodes: int = 1,
        role: Role = "both",
        syncer: str | None = None,
    ) -> None:
        super().__init__(host, Board(host, closes=role != "learner"))
        self._role = role
        self._settings = settings
        self._min_nodes = min_nodes
        self._syncer = syncer
        self._lease = Lease(self.board, self._local_step)
        self._state: LeaseState = "j"
        self._uploading = 0
        self._begun = False
        self.fragments: list[Fragment] = []
        self._learner: Learner | None = None
        self._run: Run | None = None
        self._on_service: Callable[[], None] = lambda: None
        self._office: Office | None = None
        self._share_told: int | None = None

    # -- entering ------------------------------------------------------------------------------------------

    async def enter(self) -> Found | None:
        """Write the first beat and look for the run; None if it must be created."""
        self._lease.continued(await listed_leases(self._host))
        found = await find_run(self._host)
        await self._beat()
        return found

    async def join(
        self,
        found: Found | None,
        schema: Schema,
        frozen: str | None,
        layouts: Sequence[FragmentLayout],
        theta: Sequence[Flat],
    ) -> list[Commit]:
        """The newest commit of every fragment, of a run created with ``theta`` if ``found`` is None.

        Raises :class:`SchemaMismatch` or :class:`RunMismatch` if it is another run than this node's.
        """
        keeping = asyncio.ensure_future(self._keep_beating())
        try:
            if found is None:
                assert self._settings is not None, "only a node with settings creates a run"
                found = await create_run(self._host, self._settings, schema, frozen, layouts, theta, self._syncer)
            settings = self._settings or diloco_from(found.manifest.algorithm)
            self._run = run = checked(found, settings, schema, frozen, self._host.mailbox.url)
            await self._take_precautions(run)
            self._office = Office(self._host, run, self.board) if self._role == "either" else None
            await self._list()
            commits = await load_heads(self._host, run, self.board.hints)
        finally:
            keeping.cancel()
        self.board.newest_step = max(commit.head.newest_step for commit in commits)
        self._begun = any(commit.head.version > 0 for commit in commits)
        return commits

    async def _take_precautions(self, run: Run) -> None:
        """Use the store as its class needs it from here on; refuse a way to it that is worse than the run knows."""
        if self._syncer is not None and (run.manifest.store != "none" or self._syncer not in run.manifest.closers):
            closes = run.manifest.closers[0] if run.manifest.store == "none" else "whoever is elected"
            raise RunMismatch(
                f"syncer is {self._syncer!r}, but in the run at {self._host.mailbox.url} {closes} closes.",
                "Give every node the same syncer, or none, or use another prefix.",
            )
        if run.manifest.store != "none":
            await refuse_overwriting(self._host, self._lease.newest.path)
        self.board.host = self._host = replace(self._host, mailbox=guarded(self._host, nature_of(run.manifest)))

    @property
    def store(self) -> StoreClass:
        """What the run's store was found to be."""
        assert self._run is not None, "join comes first"
        return self._run.manifest.store

    async def wait_for_nodes(self) -> None:
        """Until ``min_nodes`` nodes train or wait; says whom it sees, at growing intervals.

        Only the start of a run waits: a run that has commits goes on with whoever is there.
        """
        if self._min_nodes > 1 and not self._begun:
            await self._beat("w")
            await self._wait_for_others()
        await self._beat("t")

    async def _wait_for_others(self) -> None:
        pause, report_at = WAITING_REPORT_SECONDS, self._host.clock.now()
        beat_at = self._host.clock.now() + self._host.timeouts.period
        while True:
            await self._list()
            now = self._host.clock.now()
            here = self.board.here()
            if len(here) >= self._min_nodes:
                return
            if now >= report_at:
                missing = self._min_nodes - len(here)
                self._host.emit(RunWaited(f"waiting for {missing} more node(s) (have: {', '.join(here)})"))
                report_at, pause = now + pause, pause * WAITING_REPORT_GROWTH
            if now >= beat_at:
                await self._beat("w")
                beat_at = now + self._host.timeouts.period
            await self._host.clock.sleep(min(WAITING_POLL_SECONDS, self._host.timeouts.period / 5))

    def start(
        self,
        learner: Learner | None,
        commits: Sequence[Commit],
        on_failure: Callable[[BaseException], None],
        on_service: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to follow, close, beat and list; a syncer has no ``learner``.

        ``on_failure`` is told of a lasting fault, once, and ``on_service`` whenever :attr:`serving` changes.
        """
        assert self._run is not None, "join comes first"
        self._learner = learner
        self._on_failure, self._on_service = on_failure, on_service
        self.board.clock = self._global_step
        deliver, hurry = (learner.deliver, learner.hurry) if learner is not None else (_unread, _unhurried)

        def delivered(message: Message) -> None:
            deliver(message)
            self._reckon()

        self.fragments = [Fragment(self._host, self._run, self.board, commit, delivered, hurry) for commit in commits]
        for fragment in self.fragments:
            self._spawn(fragment.run())
        self._spawn(self._keep_beating())
        self._spawn(self._keep_listing())
        others = [node for node in self.board.here() if node != self._host.node]
        rounds = sum(commit.head.version for commit in commits)
        self._host.emit(RunJoined(self._run.id, self._host.node, self._global_step(), rounds, tuple(others)))
        self._reckon()

    # -- working -------------------------------------------------------------------------------------------

    def publish(self, snapshot: Snapshot) -> None:
        """Take a snapshot from the learner and upload it in the background; refuse it at once if its round is over.

        A node that leaves ends its tasks before they begin, and must have told by then what it lost.
        """
        fragment = self.fragments[snapshot.fragment]
        if snapshot.version != fragment.head.version:
            return self._refused(snapshot)
        fragment.taken = fragment.round
        needed = not fragment.closing  # a closer has its own in memory
        self._uploading += needed
        self._spawn(self._uploaded(snapshot, needed))

    def _refused(self, snapshot: Snapshot) -> None:
        assert self._run is not None and self._learner is not None
        round = (snapshot.version + 1) * self._run.fragments + snapshot.fragment
        self._host.emit(SnapshotRefused(self._host.node, snapshot.fragment, round, "stale"))
        self._learner.returned(snapshot.fragment, snapshot.values)

    async def _uploaded(self, snapshot: Snapshot, needed: bool) -> None:
        try:
            await self._publish(snapshot)
        finally:
            self._uploading -= needed

    async def _publish(self, snapshot: Snapshot) -> None:
        assert self._run is not None and self._learner is not None
        run, fragment = self._run, self.fragments[snapshot.fragment]
        started = self._host.clock.now()
        round = (snapshot.version + 1) * run.fragments + snapshot.fragment
        feedback = fragment.feedback
        codec, compression = wire_codec(fragment.layout, run.settings.delta_codec), run.settings.compression
        published = await self._host.clock.compute(
            lambda: encoded_snapshot(self._host, run, snapshot, round, fragment.layout, feedback)
        )
        self._learner.returned(snapshot.fragment, snapshot.values)
        if fragment.round != round:
            return  # told when the round ended
        fragment.publishing(published)
        size = 0
        if not await self._spared(fragment, round):
            link, key = self._host.link, DeltaKey(round, self._host.node).path
            started = self._host.clock.now() if fragment.closing else started
            body = await self._host.clock.compute(lambda: link.packed(published.body, codec, compression))
            await link.put(self._host.mailbox, self._host.clock, key, body)
            self.board.published_at, size = self._host.clock.now(), len(body)
            fragment.uploaded(self.board.published_at - started)
        self.board.evident([self._host.node])
        seconds = self._host.clock.now() - started
        self._host.emit(SnapshotPublished(snapshot.fragment, round, snapshot.steps, snapshot.tokens, size, seconds))

    async def counted(self, state: LearnerState, heads: Sequence[Head]) -> dict[int, int]:
        """What the run counts for this node of a checkpoint's tokens; see :mod:`gradientmail_core.engine.resuming`."""
        assert self._run is not None, "join comes first"
        return await counted(self._host, self._run, state, heads)

    async def left_over(self) -> tuple[LeftOver | None, ...]:
        """For each fragment, what a checkpoint keeps of its error feedback."""
        return tuple(fragment.left_over for fragment in self.fragments)

    def take_up(self, kept: Sequence[LeftOver | None]) -> None:
        """Go on with the error feedback of a checkpoint."""
        for fragment, residual in zip(self.fragments, kept, strict=True):
            fragment.take_up(residual)

    async def _spared(self, fragment: Fragment, round: int) -> bool:
        """Whether the closer's own snapshot need not be uploaded, because its round closed soon enough.

        A closer merges its snapshot from memory; the object would only serve a node that takes the round over.
        """
        seconds = own_upload_after(fragment.head)
        if not fragment.closing or seconds is None or self.board.leaving:
            return False
        with contextlib.suppress(TimeOver):
            await self._host.clock.within(seconds, fragment.moved.wait())
        return fragment.round != round

    @property
    def patience(self) -> float:
        """Seconds to wait at most for what a leaving node still has to end: the lease time-out."""
        return self._host.timeouts.lease

    @property
    def run_id(self) -> str:
        """The run's id; empty before :meth:`join`."""
        return self._run.id if self._run is not None else ""

    @property
    def layouts(self) -> tuple[FragmentLayout, ...]:
        """The run's fragments; empty before :meth:`join`."""
        return self._run.layouts if self._run is not None else ()

    @property
    def batch_share(self) -> int | None:
        """This node's samples of ``global_batch_size``; None if none was set."""
        settings = self._settings or (self._run.settings if self._run is not None else None)
        whole = settings.global_batch_size if settings is not None else None
        if settings is None or whole is None:
            return None
        if settings.share == "equal":
            return -(-whole // self.live_learners)
        record = self.fragments[0].head.record if self.fragments else None
        parts = as_seen(whole, record.shares if record is not None else (), self._sharers())
        return parts[self._host.node]

    def _sharers(self) -> frozenset[str]:
        return frozenset({*self.board.live_learners(), self._host.node})

    def _reckon(self) -> None:
        """Tell when this node's share of the batch has changed."""
        share, whole = self.batch_share, self._run.settings.global_batch_size if self._run is not None else None
        if share is not None and whole is not None and share != self._share_told:
            self._share_told = share
            self._host.emit(BatchShareChanged(self._host.node, share, whole, len(self._sharers())))

    @property
    def rounds_seen(self) -> int:
        """Commits of all fragments this node has aligned with or could."""
        return sum(fragment.head.version for fragment in self.fragments)

    @property
    def merged_tokens(self) -> int:
        """Tokens merged by everyone, averaged over the fragments."""
        return sum(fragment.head.merged_tokens for fragment in self.fragments) // max(len(self.fragments), 1)

    # -- leaving -------------------------------------------------------------------------------------------

    def prepare_to_leave(self) -> None:
        """Stop naming this node as a closer; rounds in flight still end."""
        self.board.leaving = True
        for fragment in self.fragments:
            fragment.moved.set()
        self._spawn(self._leaving_beat())

    async def leave(self, patience: float) -> None:
        """End what this node was closing, load the newest commits, release the lease.

        What takes longer than ``patience`` seconds each is left as it is.
        """
        deadline = self._host.clock.now() + patience
        while any(fragment.settling for fragment in self.fragments) and self._host.clock.now() < deadline:
            await self._host.clock.sleep(SETTLING_POLL_SECONDS)
        await self.stop()
        catching_up = asyncio.ensure_future(self._catch_up())
        timer = asyncio.ensure_future(self._host.clock.sleep(patience))
        await asyncio.wait({catching_up, timer}, return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        if catching_up.done():
            catching_up.result()
        catching_up.cancel()
        await self._beat("x")
        self._host.emit(SessionEnded(self._host.node, self.rounds_seen, ""))

    async def _catch_up(self) -> None:
        for fragment in self.fragments:
            while await fragment.caught_up():
                pass
            await fragment.hint()

    async def _leaving_beat(self) -> None:
        """Say that the node leaves once its snapshots are uploaded: nobody waits for those of one that leaves."""
        while self._uploading:
            await self._host.clock.sleep(SETTLING_POLL_SECONDS)
        await self._beat("d")

    # -- beats and listings --------------------------------------------------------------------------------

    async def _beat(self, state: LeaseState | None = None) -> None:
        self._state = state_of("syncer" if self.serving else self._role, state or self._state)
        await self._lease.beat(self._state)

    def _global_step(self) -> int:
        return self._learner.state.global_step if self._learner is not None else self.board.newest_step

    def _local_step(self) -> int:
        return self._learner.state.local_step if self._learner is not None else 0

    async def _keep_beating(self) -> None:
        while True:
            await self._host.clock.sleep(self._host.jitter(self._host.timeouts.period))
            silent = self._host.clock.now() - self.board.published_at
            if silent >= self._host.timeouts.period or self.board.published_at == 0:
                await self._beat()

    async def _keep_listing(self) -> None:
        while True:
            await self._host.clock.sleep(self._host.jitter(self._host.timeouts.period))
            await self._list()
            for fragment in self.fragments:
                await fragment.heal()
                await fragment.tidy()
            await self._lease.drop_late()
            await self._bury()
            await self._stand()
            self._reckon()

    async def _stand(self) -> None:
        """Take part in the election of a syncer, and go by its result; one that is paused does not stand."""
        if self._office is None or (self._state != "t" and not self.serving):
            return
        serving = await self._office.holds()
        if serving != self.serving and not self.board.leaving:
            self.serving = serving
            await self._beat("t")
            self._host.emit(SyncerElected(self._host.node, serving))
            self._on_service()

    async def _list(self) -> None:
        entries = await whole_listing(self._host.mailbox, LIVE)
        parsed = list(map(parse_live, [entry.key for entry in entries]))
        keys = [key for key in parsed if key is not None]
        if len(keys) < len(parsed):
            for entry in entries:
                if parse_live(entry.key) is None:
                    self.board.ignored(entry.key, "no key of this protocol")
        passed = self._lease.passed(keys)
        self.board.listed(keys)
        if passed:
            await self._beat()

    async def _bury(self) -> None:
        """Delete the leases of nodes that left or have long been silent; one closer does it for all."""
        run, dead = self._run, self.board.dead_leases()
        if run is None or not dead or self.board.candidates(run, 0)[:1] != (self._host.node,):
            return
        await self._lease.bury()


def _unread(message: Message) -> None:
    """What a learner would be told, on a node without one."""


def _unhurried(fragment: int, early: bool) -> None:
    """Likewise."""
