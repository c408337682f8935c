"""The invariants of a run, checked while it is played and at its end.

1. One content per round is ever acted on, and each chain is linked without a gap.
2. The two newest versions of every fragment are complete, at any moment.
3. In calm weather every fragment commits within ``lease + 5 s`` and two cycles while a node lives.
4. A snapshot is in at most one record and only if it may be: trained at least a step from the very record that its
   round follows, under its own name. A round's weights add up to one, and its tokens to the chain's.
5. Whatever a node published and lived to hear about is in a record, or it was told that it is not.
6. A round is due after every step its closer knew of: missed cycles are not made up.
7. ``live/`` is within its bound in the calm.
8. No node fails. Nobody is taken to have left who has not.
9. Every node that left holds the committed bytes of the versions it names.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.schedule import first_due_after
from gradientmail_core.engine.learner import Commit
from gradientmail_core.engine.loading import Source, parameters
from gradientmail_core.events import Event, NodeGone, RoundTakenOver, SnapshotPublished, SnapshotRefused
from gradientmail_core.mailbox.memory import MemoryMailbox
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import MANIFEST, DeltaKey, parse_live
from gradientmail_core.protocol.plan import manifest_layouts
from gradientmail_core.protocol.records import Participant, RoundRecord, Section, digest
from gradientmail_core.sim.checks import forks, manifest_of, tape
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop
from gradientmail_core.sim.world import SimulatedNode

WATCH_SECONDS = 5.0
CALM_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Written:
    """A snapshot as it was seen to be written: its key, and what its record claims."""

    key: DeltaKey
    node: str
    round: int
    base: str
    steps: int


class Judge:
    """Collects what every node wrote, acted on and said, and compares it with the store."""

    def __init__(self, settings: DiLoCo, loop: VirtualLoop, shared: MemoryMailbox | None = None) -> None:
        self._shared = shared or MemoryMailbox("judged")
        self._settings = settings
        self._clock = VirtualClock(loop)
        self._acted: dict[tuple[int, int], str] = {}
        self._written: dict[str, list[Written]] = {}
        self._lives: list[SimulatedNode] = []
        self.may_leave = False
        self.violations: list[str] = []

    def watches(self, shared: MemoryMailbox) -> None:
        """Look at this store."""
        self._shared = shared

    def born(self, node: SimulatedNode) -> None:
        """A life begins."""
        self._lives.append(node)

    def wrote(self, key: str, body: bytes) -> None:
        """An object appeared in the store, or was replaced."""
        if key.startswith("live/deltas/") and isinstance(parsed := parse_live(key), DeltaKey):
            text = _snapshot_text(body)
            if text is not None:
                record = json.loads(text)
                written = Written(parsed, record["node"], record["round"], record["base"], record["steps"])
                self._written.setdefault(digest(text), []).append(written)

    def heard(self, event: Event) -> None:
        """A node said something. Until :attr:`may_leave`, nobody leaves."""
        match event:
            case NodeGone(node=node, left=True) | RoundTakenOver(closer=node, reason="it left"):
                if not self.may_leave:
                    self.violated(f"{node} was taken to have left and has not")
            case _:
                pass

    def violated(self, what: str) -> None:
        """Note a violation, once."""
        if what not in self.violations:
            self.violations.append(what)

    def applied(self, commit: Commit) -> None:
        """A node wrote a commit into its model."""
        head = commit.head
        content = head.digest + hashlib.sha256(commit.theta.tobytes()).hexdigest()
        key = (head.fragment, head.version)
        if self._acted.setdefault(key, content) != content:
            self.violated(f"two contents of fragment {head.fragment} version {head.version} were acted on")

    async def watch(self) -> None:
        """Check completeness every few seconds."""
        while True:
            await self._clock.sleep(WATCH_SECONDS)
            await self._check_complete()

    async def calm(self, living: Sequence[SimulatedNode], seconds: float, lingers: bool) -> None:
        """Without faults every fragment must commit within ``seconds``, and again within as many more.

        Ends once they have, unless it ``lingers`` to see what comes late.
        """
        for _ in range(2):
            ends_at = self._clock.now() + seconds
            before = await self._versions()
            waiting = set(range(self._fragments))
            while self._clock.now() < ends_at and (waiting or lingers):
                await self._clock.sleep(CALM_LOOK_SECONDS)
                after = await self._versions()
                waiting = {fragment for fragment in waiting if after[fragment] <= before[fragment]}
            for fragment in sorted(waiting):
                self.violated(f"fragment {fragment} did not commit for {seconds:.0f} s of calm")
        await self._check_live(len(living))

    async def _versions(self) -> Counter[int]:
        return Counter(record.round % self._fragments for record in await self._tape())

    async def conclude(self) -> None:
        """Judge the whole tape, every life and every model."""
        for node in self._lives:
            self._check_life(node)
        if not await self._created():
            return self.violated("no run was created")
        for round in await forks(self._shared):
            self.violated(f"round {round} does not follow its predecessor")
        await self._check_complete()
        records = await self._tape()
        self._check_merged(records)
        self._check_schedule(records)
        for node in self._lives:
            if _left(node):
                self._check_ledger(node, records)
                await self._check_model(node, records)

    async def rounds(self) -> int:
        """Committed rounds."""
        return len(await self._tape())

    @property
    def _fragments(self) -> int:
        return self._settings.fragments

    async def _created(self) -> bool:
        return await self._shared.get(MANIFEST) is not None

    async def _tape(self) -> list[RoundRecord]:
        return await tape(self._shared) if await self._created() else []

    async def _check_complete(self) -> None:
        if not await self._created():
            return
        manifest, _ = await manifest_of(self._shared)
        layouts = manifest_layouts(manifest)
        assert not isinstance(layouts, Rejected)
        chains: list[list[tuple[Section, ...]]] = [[(section,)] for section in manifest.theta]
        for record in await self._tape():
            chains[record.round % self._fragments].append(record.sections)
        for layout, chain in zip(layouts, chains, strict=True):
            source = Source(self._shared, self._clock, manifest, layout)
            for version in range(max(len(chain) - 2, 0), len(chain)):
                present = [await self._shared.get(section.key) is not None for section in chain[version]]
                if not all(present) or isinstance(await parameters(source, version, chain[version]), Rejected):
                    self.violated(f"fragment {layout.fragment} misses a payload of its two newest versions")

    async def _check_live(self, living: int) -> None:
        deltas = [entry async for entry in self._shared.list("live/deltas/")]
        bound = (2 + self._settings.in_flight) * max(living, 1) * 2 + 16
        if len(deltas) > bound + 8 * self._fragments:
            self.violated(f"{len(deltas)} snapshots lie under live/, the bound is {bound}")

    def _check_life(self, node: SimulatedNode) -> None:
        task = node.task
        if task is not None and task.done() and not task.cancelled() and task.exception() is not None:
            self.violated(f"{node.name} failed: {task.exception()!r}")

    def _check_merged(self, records: Sequence[RoundRecord]) -> None:
        merged = [participant.snapshot for record in records for participant in record.participants]
        for snapshot, times in Counter(merged).items():
            if times > 1:
                self.violated(f"snapshot {snapshot[:8]} was merged {times} times")
        tokens: Counter[int] = Counter()
        for record in records:
            fragment = record.round % self._fragments
            total = sum(participant.weight for participant in record.participants)
            if record.participants and not np.isclose(total, 1.0):
                self.violated(f"the weights of round {record.round} add up to {total}")
            for participant in record.participants:
                self._check_participant(record, participant)
            tokens[fragment] += sum(participant.tokens for participant in record.participants)
            if record.merged_tokens != tokens[fragment]:
                self.violated(f"round {record.round} counts {record.merged_tokens} tokens of {tokens[fragment]}")

    def _check_participant(self, record: RoundRecord, participant: Participant) -> None:
        who = f"{participant.node}'s snapshot in round {record.round}"
        if participant.steps == 0:
            self.violated(f"{who} has no trained step")
        for written in self._written.get(participant.snapshot, ())[:1]:
            if (written.node, written.round) != (participant.node, record.round):
                self.violated(f"{who} is {written.node}'s of round {written.round}")
            if written.base != record.prev:
                self.violated(f"{who} was trained from another record")

    def _check_schedule(self, records: Sequence[RoundRecord]) -> None:
        """The next round is due at the first grid step after all that the closer knew of."""
        for record in records:
            fragment = record.round % self._fragments
            newest = max(record.step, record.newest_step)
            if record.next_step != first_due_after(newest, fragment, self._fragments, self._settings.sync_every):
                self.violated(
                    f"round {record.round}, closed at step {newest}, makes the next due at {record.next_step}"
                )

    def _check_ledger(self, node: SimulatedNode, records: Sequence[RoundRecord]) -> None:
        """Every snapshot of a life that heard its fate out was merged, or its node was told that it was not."""
        mine = (node.name, node.incarnation)
        merged = {
            record.round for record in records if mine in {(who.node, who.incarnation) for who in record.participants}
        }
        told = {event.round for _, event in node.events if isinstance(event, SnapshotRefused)}
        published = {event.round for _, event in node.events if isinstance(event, SnapshotPublished)}
        closed = {record.round for record in records}
        for round in sorted((published & closed) - merged - told):
            self.violated(f"{node.name} never heard that its snapshot of round {round} was not merged")
        for round in sorted(merged & told):
            self.violated(f"{node.name} was told that its snapshot of round {round} was lost, and it is merged")

    async def _check_model(self, node: SimulatedNode, records: Sequence[RoundRecord]) -> None:
        assert node.learner is not None
        manifest, _ = await manifest_of(self._shared)
        layouts = manifest_layouts(manifest)
        assert not isinstance(layouts, Rejected)
        by_round = {record.round: record for record in records}
        for layout, track in zip(layouts, node.learner.state.tracks, strict=True):
            record = by_round.get(track.version * self._fragments + layout.fragment)
            if record is None:
                continue
            source = Source(self._shared, self._clock, manifest, layout)
            committed = await parameters(source, track.version, record.sections)
            mine = np.empty(layout.size, np.float32)
            node.model.read(layout, mine)
            if not isinstance(committed, Rejected) and mine.tobytes() != committed.tobytes():
                self.violated(f"{node.name} left with other parameters than fragment {layout.fragment}'s commit")


def _left(node: SimulatedNode) -> bool:
    """True if this life ended as it should."""
    task = node.task
    return task is not None and task.done() and not task.cancelled() and task.exception() is None


def _snapshot_text(body: bytes) -> str | None:
    """A snapshot's record as it stands in its payload's header, None for what is none."""
    try:
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        text = header["__metadata__"]["gradientmail"]
    except (ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) else None
