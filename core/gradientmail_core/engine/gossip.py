"""A node of a gossip run: its lease, its rounds one after the other, and the way back for one that fell behind.

There is no chain of commits to agree on. A node is never stopped by another: what does not come in time is left out
of its mean. So any node may die at any moment, and what it owed (a start, a gradient, the mean of a fragment) is
missing from one round of the others. Rounds overlap: a round's means may still be made while the next one trains.

A failure for good (a store that refuses, a name taken twice) ends the tasks, is kept, and told to the training
thread. Everything else, garbage included, costs some mixing.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.algorithms.mixing import divergence
from gradientmail_core.clock import TimeOver
from gradientmail_core.engine.gossip_gathering import Pace, Surroundings, list_leases, smoothed
from gradientmail_core.engine.gossip_learner import (
    Answer,
    Begun,
    Ended,
    GossipLearner,
    Moved,
    Rejoin,
    Renumber,
    Unmixed,
)
from gradientmail_core.engine.gossip_presence import Presence
from gradientmail_core.engine.gossip_roster import (
    Agreed,
    Ahead,
    Alone,
    Behind,
    Draft,
    Listed,
    Probes,
    listed_gossip,
    newest_roster,
    standing,
)
from gradientmail_core.engine.gossip_round import GossipRound, probe_layout
from gradientmail_core.engine.gossip_shares import GossipRun, Means, initial_mean, mean_values, read_mean, read_share
from gradientmail_core.engine.gossip_sweeping import sweep
from gradientmail_core.engine.joining import Found, check_same, create_run, find_run
from gradientmail_core.engine.life import Life
from gradientmail_core.engine.patience import Patience
from gradientmail_core.engine.precautions import guarded, nature_of, refuse_unconditional
from gradientmail_core.engine.run import Board, Host
from gradientmail_core.errors import RunMismatch
from gradientmail_core.events import Disagreement, Rejoined, RoundMixed, RunJoined, SessionEnded
from gradientmail_core.protocol.exchange import get_section
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.gossip import MeanKey, MeanRecord, ShareKey
from gradientmail_core.protocol.keys import LeaseState
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Schema

ROUNDS_ALIVE = 2
PROBED_MOST = 16
PAYLOAD_PATIENCE_SECONDS = 1.0


class GossipNode(Life):
    """One process's part in a gossip run. All coroutines run on the loop that calls :meth:`enter`."""

    def __init__(self, host: Host, settings: FactoredGossip, *, min_nodes: int = 1) -> None:
        super().__init__(host, Board(host))
        self._settings = settings
        self._min_nodes = min_nodes
        self._presence = Presence(host, self.board, self._local_step)
        self._here: Surroundings | None = None
        self._learner: GossipLearner | None = None
        self._rounds: list[tuple[GossipRound, asyncio.Task[None]]] = []
        self._opening: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._current: Begun | None = None
        self._begun_at: float | None = None
        self._pace = Pace()
        self._first_round = 0

    # -- entering ------------------------------------------------------------------------------------------

    async def enter(self) -> Found | None:
        """Write the first beat and look for the run; None if it must be created."""
        leases = await list_leases(self._host, self.board)
        found = await find_run(self._host)
        await self._presence.enter(leases)
        return found

    async def join(
        self,
        found: Found | None,
        schema: Schema,
        frozen: str | None,
        layouts: Sequence[FragmentLayout],
        theta: Sequence[Flat],
    ) -> Rejoin:
        """Where to start: the newest mean of every fragment and the round the run is in; creates the run if needed.

        Raises :class:`SchemaMismatch`, :class:`RunMismatch` or :class:`ConfigurationError`.
        """
        keeping = asyncio.ensure_future(self._presence.keep_beating())
        try:
            if found is None:
                found = await create_run(self._host, self._settings, schema, frozen, layouts, theta)
            check_same(found, self._settings, schema, frozen, self._host.mailbox.url)
            await refuse_unconditional(self._host)
            mailbox = guarded(self._host, nature_of(found.manifest))
            self.board.host = self._host = replace(self._host, mailbox=mailbox)
            run = GossipRun.of(found.manifest, found.layouts, self._settings)
            self._here = Surroundings(self._host, run, self.board, Means())
            await self._presence.look()
            listed = await listed_gossip(self._host, self.board)
            vectors = await newest_means(self._here, listed)
            newest = await newest_roster(self._host, run, listed.rosters)
        finally:
            keeping.cancel()
        self._first_round = 0 if newest is None else newest
        return Rejoin(self._first_round, tuple(vectors))

    async def wait_for_nodes(self) -> None:
        """Until ``min_nodes`` nodes train or wait; a run that has begun goes on with whoever is there."""
        if self._min_nodes > 1 and self._first_round == 0:
            await self._presence.beat("w")
            await self._presence.wait_for(self._min_nodes)
        await self._presence.beat("t")

    def start(self, learner: GossipLearner, on_failure: Callable[[BaseException], None]) -> None:
        """Begin to beat and list; the learner's first round follows. ``on_failure`` hears of a lasting fault, once."""
        self._learner = learner
        self._on_failure = on_failure
        self.board.clock = lambda: learner.state.global_step
        self._spawn(self._presence.keep_beating())
        self._spawn(self._presence.keep_listing())
        others = tuple(node for node in self.board.here() if node != self._host.node)
        state = learner.state
        self._host.emit(RunJoined(self.run_id, self._host.node, state.global_step, state.round, others))

    # -- rounds --------------------------------------------------------------------------------------------

    def begin(self, begun: Begun) -> None:
        """The learner starts a round: find or draw up its roster, and take part. What an older one still does ends."""
        now = self._host.clock.now()
        if self._begun_at is not None:
            self._pace = replace(self._pace, round=smoothed(self._pace.round, now - self._begun_at))
        self._begun_at = now
        self._current = begun
        self._opened.clear()
        if self._opening is not None:
            self._opening.cancel()
        while len(self._rounds) >= ROUNDS_ALIVE:
            self._rounds.pop(0)[1].cancel()
        self._opening = self._spawn(self._open(begun))

    async def _open(self, begun: Begun) -> None:
        here, learner = self._surroundings(), self._learner
        assert learner is not None
        await self._presence.look()
        draft = Draft(await self._probes(begun.round - 1), self.board.leaving)
        match await standing(self._host, here.run, self.board, begun.round, draft):
            case Ahead(round=round):
                listed = await listed_gossip(self._host, self.board)
                learner.deliver(Rejoin(round, tuple(await newest_means(here, listed))))
            case Behind(round=round):
                learner.deliver(Renumber(begun.round, round))
            case Alone(reason=reason):
                self.board.ignored(f"round {begun.round}", reason)
            case Agreed(roster=roster, listed=seen):
                round_ = GossipRound(
                    here, roster, begun, lambda: self._pace, learner.deliver, learner.hurry, self._mean_seen
                )
                round_.leaving = self.board.leaving
                self._rounds.append((round_, self._spawn(round_.run())))
                if roster.l2 is not None or roster.js is not None:
                    self._host.emit(Disagreement(roster.round, roster.l2, roster.js, roster.strong))
                if seen is not None:
                    self._spawn(self._tidy(seen, begun.round))
        self._opened.set()

    async def _tidy(self, listed: Listed, round: int) -> None:
        await sweep(self._host, self._surroundings().run, listed, round)
        await self._presence.bury()

    def exchange(self, ended: Ended) -> None:
        """The learner ended a round's training and waits for :class:`Answer`, which comes within the time-out."""
        self._spawn(self._exchange(ended))

    async def _exchange(self, ended: Ended) -> None:
        assert self._learner is not None
        started = self._host.clock.now()
        gradients, answered = ended.gradients, tuple[str, ...]()
        with contextlib.suppress(TimeOver):
            await self._host.clock.within(self._settings.timeout, self._opened.wait())
        if self._rounds and self._rounds[-1][0].number == ended.round:
            exchanged = await self._rounds[-1][0].exchanged(ended)
            gradients, answered = exchanged.gradients, exchanged.partners
        self._learner.deliver(Answer(ended.round, gradients, answered, self._host.clock.now() - started))

    def moved(self, moved: Moved) -> None:
        """The learner took its outer step, or went on elsewhere. Called on its thread."""
        step = self._learner.state.global_step if self._learner is not None else 0
        if moved.rejoined:
            self._host.emit(Rejoined(moved.round, moved.steps))
        else:
            self._host.emit(RoundMixed(moved.round, step, moved.steps, moved.partners, moved.mixed, moved.waited))

    def _mean_seen(self, seconds: float) -> None:
        self._pace = replace(self._pace, mean=smoothed(self._pace.mean, seconds))

    async def _probes(self, round: int) -> Probes:
        """How far nodes were apart in ``round``, as far as this node can tell."""
        known = next((round_ for round_, _ in self._rounds if round_.number == round), None)
        if known is None:
            return Probes()
        return Probes(known.l2, await self._divergence(known))

    async def _divergence(self, round_: GossipRound) -> float | None:
        shape = round_.outputs_shape
        if shape is None:
            return None
        here = self._surroundings()
        layout, found = probe_layout(shape), list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]()
        for node in round_.roster.active[:PROBED_MOST]:
            key = ShareKey(round_.number, "probe", 0, node)
            share = await read_share(self._host, here.run, here.means, key, layout, None)
            if share is not None and not isinstance(share, Rejected):
                values = np.empty(layout.size, np.float32)
                share.decode(0, layout.size, values)
                found.append(values.reshape(shape))
        return divergence(found) if len(found) > 1 else None

    # -- what a session reads ------------------------------------------------------------------------------

    @property
    def settings(self) -> FactoredGossip:
        """The run's settings."""
        return self._settings

    @property
    def run_id(self) -> str:
        """The run's id; empty before :meth:`join`."""
        return self._here.run.id if self._here is not None else ""

    @property
    def layouts(self) -> tuple[FragmentLayout, ...]:
        """The run's fragments; empty before :meth:`join`."""
        return self._here.run.layouts if self._here is not None else ()

    @property
    def rounds_seen(self) -> int:
        """Rounds of the run that are over."""
        return self._learner.state.round if self._learner is not None else 0

    @property
    def merged_tokens(self) -> int:
        """Tokens of all nodes that are in the newest means, averaged over the fragments."""
        if self._here is None:
            return 0
        newest = [self._here.means.newest(layout.fragment) for layout in self.layouts]
        return sum(mean.tokens for mean in newest if mean is not None) // max(len(newest), 1)

    # -- leaving -------------------------------------------------------------------------------------------

    def prepare_to_leave(self) -> None:
        """Say that the node leaves; it sees to it that the mean of its last round is made."""
        self.board.leaving = True
        for round_, _ in self._rounds:
            round_.leaving = True
        self._spawn(self._presence.beat("d"))
        self._spawn(self._bound_mixing())

    async def _bound_mixing(self) -> None:
        """Tell the learner when Mix1 of its last round need not be waited for any more."""
        assert self._learner is not None
        with contextlib.suppress(TimeOver):
            await self._host.clock.within(self._settings.timeout, self._last_mixed())
        self._learner.deliver(Unmixed())

    async def _last_mixed(self) -> None:
        await self._opened.wait()
        last = self._rounds[-1][0] if self._rounds else None
        if last is not None and self._current is not None and last.number == self._current.round and last.taking_part:
            await last.mixed.wait()

    async def leave(self, patience: float) -> None:
        """Release the lease, once the means this node owes are made, or after ``patience`` seconds."""
        if self._rounds and self._learner is not None and not self._learner.outstanding:
            with contextlib.suppress(TimeOver):
                await self._host.clock.within(patience, self._rounds[-1][0].duties_done())
        await self.stop()
        await self._presence.beat("x")
        self._host.emit(SessionEnded(self._host.node, self.rounds_seen, ""))

    # -- parts ---------------------------------------------------------------------------------------------

    async def _beat(self, state: LeaseState | None = None) -> None:
        await self._presence.beat(state)

    def _surroundings(self) -> Surroundings:
        assert self._here is not None, "join comes first"
        return self._here

    def _local_step(self) -> int:
        return self._learner.state.local_step if self._learner is not None else 0


async def newest_means(here: Surroundings, listed: Listed) -> list[Flat]:
    """The newest readable mean of every fragment with its outer state; what the run began from where there is none.

    Raises :class:`RunMismatch` if not even that can be read within the lease time-out.
    """
    return list(await asyncio.gather(*(_newest_mean(here, layout, listed) for layout in here.run.layouts)))


async def _newest_mean(here: Surroundings, layout: FragmentLayout, listed: Listed) -> Flat:
    host, run = here.host, here.run
    for round in listed.means(layout.fragment):
        record = await read_mean(host, run, MeanKey(round, layout.fragment, full=True))
        if isinstance(record, MeanRecord):
            mean = await mean_values(host, run, here.means, record)
            if not isinstance(mean, Rejected):
                here.means.keep(mean)
                return mean.values
    return await _initial(here, layout)


async def _initial(here: Surroundings, layout: FragmentLayout) -> Flat:
    host, section = here.host, here.run.manifest.theta[layout.fragment]
    patience, began = Patience.starting(host), host.clock.now()
    while isinstance(theta := await get_section(host.mailbox, host.clock, section, layout), Rejected):
        patience = patience.missed(began)
        if patience.is_over:
            raise RunMismatch(
                f"The initial parameters at {host.mailbox.url} cannot be read: {section.key} is {theta.reason}.",
                "Restore that object, or start a new run under another prefix.",
            )
        await host.clock.sleep(host.jitter(PAYLOAD_PATIENCE_SECONDS))
        began = host.clock.now()
    mean = initial_mean(here.run, layout.fragment, theta)
    here.means.keep(mean)
    return mean.values
