"""Closing a round, step by step: gather snapshots until quorum and grace, merge, write payloads, commit.

Snapshots are fetched side by side, so a slow one delays none of the others, and each is judged once. At any
moment another node's commit may come first; then that one stands and this node's payloads are removed.
"""

import asyncio
import math

import numpy as np

from gradientmail_core.algorithms.spool import Spool
from gradientmail_core.engine.closing import (
    Merger,
    OuterState,
    judged,
    merger,
    outer_layout,
    put_sections,
    round_record,
)
from gradientmail_core.engine.election import next_closer, next_of_all
from gradientmail_core.engine.fetching import LISTING, Fetches, asked_for
from gradientmail_core.engine.gathering import (
    FIRST_VERSIONS,
    Accepted,
    Gathering,
    blended,
    closes_at,
    grace_seconds,
    reached,
    sound,
    step_seconds,
    with_accepted,
    with_quorum,
    with_refused,
    without_outliers,
)
from gradientmail_core.engine.patience import Patience
from gradientmail_core.engine.polling import (
    barrier_gap,
    overdue_after,
    snapshot_gap,
    snapshots_due_at,
    snapshots_expected_at,
    usual_lag,
)
from gradientmail_core.engine.view import ChainView
from gradientmail_core.events import (
    RoundCommitted,
    RoundLost,
)
from gradientmail_core.protocol.exchange import (
    Decided,
    bounded_get,
    commit_round,
    get_section,
    read_round,
    written,
)
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import DeltaKey, delta_prefix, parse_live
from gradientmail_core.protocol.records import Refusal, RoundRecord, Section
from gradientmail_core.tensors.buffers import wire_codec
from gradientmail_core.tensors.kernels import sum_of_squares
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.payload import payload_bytes_max
from gradientmail_core.tensors.schema import FragmentLayout

LAST_CALL_SECONDS = 0.25
LAST_CALL_CLOSINGS = 3
LOOK_PERIODS = 6
PASSED_LOOK_SECONDS = 1.0
NEVER = float("inf")


class Closer(ChainView):
    """A chain view that can close its open round."""

    async def _close(self) -> Decided:
        self.gathering = Gathering()
        first = self.head.version < FIRST_VERSIONS
        self._theta_norm = math.sqrt(sum_of_squares(self.theta)) if first else math.inf
        self._spool = Spool(self._run.settings.merge_memory)
        return await self._gathered() or await self._commit()

    async def _gathered(self) -> Decided | None:
        """Gather until the round closes; another node's commit if that comes first."""
        fetches = Fetches()
        attempts = 0
        asked_at = -NEVER
        before, looked_at, looks = asked_at, self._host.clock.now(), 0
        try:
            while True:
                now = self._host.clock.now()
                self._unlock(now)
                if self.gathering.quorum_at is None and self.gathering.accepted:
                    fit = sound(self.gathering, self.head.version + 1, self.head.estimates, self._theta_norm)
                    self.gathering = with_quorum(self.gathering, self._needed(), now, self._early_count_from(), fit)
                closes = closes_at(self.gathering, self._board.live_learners(), self._run.settings, self.head.estimates)
                if closes is not None and now >= closes:
                    await self._last_call(fetches)
                    break
                self._take_own(fetches)
                look_at = self._look_at(looked_at, looks)
                if now >= look_at:
                    looked_at, looks = now, looks + 1
                    state = await read_round(self._host.mailbox, self._run.id, self.round)
                    if isinstance(state, Decided):
                        return state
                ask_at = self._snapshots_ask_at(attempts, asked_at, closes)
                if now >= ask_at:
                    self._fetch_missing(fetches)
                    attempts, before, asked_at = attempts + 1, asked_at, now
                    continue
                hurry_at = self._hurried(now)
                closes_by = NEVER if closes is None else closes
                until = min(ask_at, look_at, hurry_at, closes_by, now + self._host.timeouts.period)
                if self.gathering.accepted and self._early_count_from() > now:
                    until = min(until, self._early_count_from())
                await self.bell.wait(self._host.clock, until - now)
        finally:
            fetches.abandon()
        self._learn_lag(attempts, asked_at, before)
        return None

    def _hurried(self, now: float) -> float:
        """Let a closer that is slow itself publish before it closes without its own snapshot; when to do so."""
        others = any(node != self._host.node for node in self._board.live_learners())
        hurry_at = self._hurry_at() if others else NEVER
        if hurry_at < NEVER and (now >= hurry_at or self.gathering.quorum_at is not None):
            self._hurry(self.head.fragment, True)
            return NEVER
        return hurry_at

    def _learn_lag(self, attempts: int, asked_at: float, before: float) -> None:
        own = self.published if self.published is not None and self.published.round == self.round else None
        if self.gathering.heard - {self._host.node} and self.head.interval is not None:
            due_at = snapshots_due_at(self.head, own.at if own is not None else None)
            self._lag = usual_lag(self._lag, attempts, asked_at - due_at, before - due_at)

    def _early_count_from(self) -> float:
        """When early snapshots make a quorum: once the round is expected and this node, if it trains, reported."""
        trains = self._host.node in self._board.live_learners() and self._host.node not in self.gathering.heard
        return NEVER if trains else self._expected_at()

    async def _last_call(self, fetches: Fetches) -> None:
        """Ask once more for what is missing, so that nothing is left out that was there when the grace ended.

        A snapshot that a listing showed is there: its download is given longer than a question.
        """
        self._fetch_missing(fetches)
        usual = self.head.estimates
        if asking := fetches.running():
            await self._first_of(list(asking.values()), max(usual.sync, LAST_CALL_SECONDS))
        listed = self._board.deltas.get(self.round, set())
        if arriving := [task for node, task in fetches.running().items() if node in listed]:
            await self._first_of(arriving, LAST_CALL_CLOSINGS * (usual.quorum + usual.sync))

    async def _first_of(self, tasks: list[asyncio.Task[None]], seconds: float) -> None:
        """Until all ``tasks`` ended, at most ``seconds``."""

        async def all_of_them() -> None:
            await asyncio.wait(tasks)

        timer, together = asyncio.ensure_future(self._host.clock.sleep(seconds)), asyncio.ensure_future(all_of_them())
        try:
            await asyncio.wait({timer, together}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            together.cancel()

    def _snapshots_ask_at(self, attempts: int, asked_at: float, closes: float | None) -> float:
        own = self.published if self.published is not None and self.published.round == self.round else None
        if own is not None and self._stands_since() is not None:
            wait = min(barrier_gap(max(asked_at - own.at, 0.0)), self._host.timeouts.period)
            return max(asked_at, own.at) + self._host.jitter(wait)
        if attempts:
            grace = closes - self.gathering.quorum_at if closes is not None and self.gathering.quorum_at else None
            wait = min(snapshot_gap(attempts - 1, self.head.interval, grace), self._host.timeouts.period)
            return asked_at + self._host.jitter(wait)
        listed = bool(self._board.deltas.get(self.round))
        return snapshots_expected_at(self.head, own.at if own else None, listed, self._host.timeouts.period, self._lag)

    def _take_own(self, fetches: Fetches) -> None:
        """This node's own snapshot needs no request."""
        me, own = self._host.node, self.published
        mine = own is not None and own.round == self.round and me not in self.gathering.heard
        if fetches.idle(me) and mine and me not in fetches:
            fetches.begin(me, self._fetch(me, self.round, fetches.lines))

    def _look_at(self, looked_at: float, looks: int) -> float:
        """When to look (again) whether another node committed the round.

        At once when something says so. When this node should have closed it long ago, since that of which no sign
        was listed may have happened: ever more rarely. Else now and then.
        """
        period = self._host.timeouts.period
        if self._board.passed_by(self.head.fragment, self.round):
            return looked_at + (min(PASSED_LOOK_SECONDS, period) if looks else 0.0)
        late = overdue_after(self.head, self._host.timeouts.lease) * 2.0 ** min(looks, 20)
        due_at = looked_at if looks else max(looked_at, self._expected_at())
        return min(due_at + late, looked_at + LOOK_PERIODS * period)

    def _fetch_missing(self, fetches: Fetches) -> None:
        listed = self._board.deltas.get(self.round, set())
        missing = {*self._board.live_learners(), *listed} - self.gathering.heard
        missing.discard(self._host.node)  # its own is taken as soon as it is there
        nodes, listing = asked_for(missing, listed)
        for node in nodes:
            if fetches.idle(node):
                fetches.begin(node, self._fetch(node, self.round, fetches.lines))
        if listing and fetches.idle(LISTING):
            fetches.begin(LISTING, self._list_round(fetches))

    async def _list_round(self, fetches: Fetches) -> None:
        """List the round's snapshots and fetch those that this closer does not have yet."""
        await self._look_for_others()
        for node in sorted(self._board.deltas.get(self.round, set()) - self.gathering.heard - {self._host.node}):
            if fetches.idle(node):
                fetches.begin(node, self._fetch(node, self.round, fetches.lines))

    async def _look_for_others(self) -> None:
        """List who has published for the open round."""
        round = self.round
        keys = [parse_live(entry.key) async for entry in self._host.mailbox.list(delta_prefix(round))]
        self._board.reported(round, sorted(key.node for key in keys if isinstance(key, DeltaKey)))

    async def _fetch(self, node: str, round: int, lines: asyncio.Semaphore) -> None:
        async with lines:
            body = await self._snapshot_body(node, round)
        if body is None:
            return
        head, spool = self.head, None if node == self._host.node else self._spool
        verdict = await self._host.clock.compute(lambda: judged(body, node, round, head, self._run, spool))
        if node in self.gathering.heard:
            return
        now = self._host.clock.now()
        if isinstance(verdict, Accepted):
            self._board.reported(round, [node])
            self.gathering = with_accepted(self.gathering, verdict, now)
        else:
            self.gathering = with_refused(self.gathering, verdict)
        self.bell.ring()

    async def _snapshot_body(self, node: str, round: int) -> bytes | bytearray | None:
        if node == self._host.node and self.published is not None and self.published.round == round:
            return self.published.body
        if node == self._host.node:
            return None
        limit = payload_bytes_max(self.layout, wire_codec(self.layout, self._run.settings.delta_codec))
        return await bounded_get(self._host.mailbox, DeltaKey(round, node).path, limit)

    async def _commit(self) -> Decided:
        started = self._host.clock.now()
        head = self.head
        if (replaced := await self._replaced()) is not None:
            return replaced
        gathering = without_outliers(self.gathering, head.version + 1, head.estimates, self._theta_norm)
        result = await self._merged(gathering)
        if isinstance(result, Decided):
            return result
        if result is None:
            gathering = _void(gathering)
            sections = tuple(section for section in head.sections if section.name != "roll")
        else:
            sections = await put_sections(
                self._host, self._run, head, result, self._outer_layout(), whole=self._whole_next
            )
        grace = grace_seconds(self._run.settings, head.estimates, step_seconds(gathering, head.estimates))
        record = round_record(
            self._host,
            self._run,
            head,
            gathering=gathering,
            sections=sections,
            estimates=blended(head.estimates, gathering, grace=grace, sync=self._host.clock.now() - started),
            cosine=result.cosine if result is not None else None,
            newest_step=self._newest_step(gathering),
            closer=self._next_closer(),
            skipped=self._skipped,
            live=self._board.live_learners(),
        )
        short = await written(self._host.mailbox, record)
        decided = await commit_round(self._host.mailbox, self._host.clock, short)
        if decided.record != short:
            self._host.emit(RoundLost(self.head.fragment, record.round, decided.record.node))
            ours = short.sections if result is not None else [section for section in (short.roll,) if section]
            await self._sweeper.discard(ours, keep=decided.record.sections)
        else:
            self._settled(decided, record, result, started)
        return decided

    def _newest_step(self, gathering: Gathering) -> int:
        """How far the run's clock has come: in the newest records, on this node, or on one that takes part."""
        others = reached(gathering, self._run.settings, self.head.estimates, self._host.clock.now())
        return max(self._board.newest_step, self._board.clock(), others)

    async def _replaced(self) -> Decided | None:
        """Where creates race: the record that stands in the head's place by now, if it is another."""
        if self._run.manifest.store != "racy" or self.head.record is None:
            return None
        state = await read_round(self._host.mailbox, self._run.id, self.head.record.round)
        return state if isinstance(state, Decided) and state.digest != self.head.digest else None

    async def _merged(self, gathering: Gathering) -> Merger | Decided | None:
        if not gathering.accepted:
            return None
        outer = await self._outer_state()
        if isinstance(outer, Decided):
            return outer
        theta, head = self.theta, self.head
        return await self._host.clock.compute(lambda: merger(self._run, head, theta, outer, gathering.accepted))

    def _settled(self, decided: Decided, record: RoundRecord, result: Merger | None, started: float) -> None:
        """Go on from this node's own commit, whose full list ``record`` holds."""
        self._ours = decided
        if result is not None:
            self.theta = result.theta
            self._outer = (decided.digest, result.outer)
        elif self._outer is not None and self._outer[0] == self.head.digest:
            self._outer = (decided.digest, self._outer[1])
        self._host.emit(
            RoundCommitted(
                fragment=self.head.fragment,
                round=record.round,
                participants=tuple(participant.node for participant in record.participants),
                refused=tuple(f"{refusal.node}: {refusal.reason}" for refusal in record.refusals),
                cosine=record.cosine,
                seconds=self._host.clock.now() - started,
            )
        )

    def _next_closer(self) -> str:
        if self._run.manifest.store == "none":
            return self._run.manifest.closers[self.head.fragment]
        board, run, me = self._board, self._run, self._host.node
        live, leaving = board.live_closers(), board.leaving
        if run.one_closer:
            return next_of_all(me, run=run.id, closers=board.closers, live=live, leaving=leaving)
        fragment = self.head.fragment
        return next_closer(me, run=run.id, fragment=fragment, closers=board.closers, live=live, leaving=leaving)

    def _outer_layout(self) -> FragmentLayout:
        return outer_layout(self.layout, self._run.settings.outer.state_names())

    async def _outer_state(self) -> OuterState | Decided:
        """The outer optimizer's state at the head: from memory, from the store, or zeros for version 0.

        If its payload cannot be read, another node may have gone on: then its commit. If nobody has for the lease
        time-out, the state is lost and starts anew.
        """
        if (here := self.outer) is not None:
            return here
        patience = Patience.starting(self._host)
        while True:
            began = self._host.clock.now()
            state = await self._read_outer()
            if not isinstance(state, Rejected):
                return state
            newer = await read_round(self._host.mailbox, self._run.id, self.round)
            if isinstance(newer, Decided):
                return newer
            patience = patience.missed(began)
            if patience.is_over:
                return self._no_outer()
            await self._host.clock.sleep(self._host.timeouts.period)

    async def _read_outer(self) -> OuterState | Rejected:
        """The outer state that the head's record names; zeros if it names none."""
        names = self._run.settings.outer.state_names()
        section, left_out = self.head.section("outer"), self.head.section("residual")
        flat: Flat | Rejected = np.zeros(self.layout.size * len(names), np.float32)
        if section is not None and names:
            flat = await self._section(section, self._outer_layout())
        if isinstance(flat, Rejected):
            return flat
        arrays = tuple(flat[i * self.layout.size : (i + 1) * self.layout.size] for i in range(len(names)))
        if left_out is None or not self._run.settings.keeps_residual:
            return OuterState(arrays)
        residual = await self._section(left_out, self.layout)
        return residual if isinstance(residual, Rejected) else OuterState(arrays, residual)

    async def _section(self, section: Section, layout: FragmentLayout) -> Flat | Rejected:
        values = await get_section(self._host.mailbox, self._host.clock, section, layout)
        if isinstance(values, Rejected):
            self._board.ignored(section.key, values.reason)
        return values

    def _no_outer(self) -> OuterState:
        return OuterState(tuple(np.zeros(self.layout.size, np.float32) for _ in self._run.settings.outer.state_names()))


def _void(gathering: Gathering) -> Gathering:
    """The gathering when nothing of it can be merged: what was accepted is refused as not finite."""
    for snapshot in gathering.accepted:
        record = snapshot.record
        refusal = Refusal(record.node, record.incarnation, snapshot.digest, "nonfinite")
        gathering = with_refused(gathering, refusal)
    return Gathering(refused=gathering.refused, heard=gathering.heard, first_at=gathering.first_at)
