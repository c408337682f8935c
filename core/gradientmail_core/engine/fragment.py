"""One fragment's chain as a node sees it: follow the commits, or close the rounds; never both at once.

Each fragment has a task of its own, so a slow payload of one never delays another. The task alternates:
from the head it either closes the next round (its node is the named closer, or has won a claim) or asks for
the commit. Whatever ends the round, the first commit in the tape is what every node goes on from; a closer
that loses the race adopts the winner's, so taking over from a closer that was only slow harms nobody.
"""

import asyncio
from collections.abc import Callable, Mapping

import numpy as np

from gradientmail_core.engine.chain import Head, succeeded
from gradientmail_core.engine.closing import (
    Merger,
    judged,
    merger,
    outer_layout,
    put_sections,
    round_record,
)
from gradientmail_core.engine.election import next_closer
from gradientmail_core.engine.gathering import (
    Accepted,
    Gathering,
    blended,
    closes_at,
    grace_seconds,
    step_seconds,
    with_accepted,
    with_quorum,
    with_refused,
    without_outliers,
)
from gradientmail_core.engine.learner import Commit, Message, Overdue, Wanted
from gradientmail_core.engine.polling import (
    commit_expected_at,
    commit_gap,
    overdue_after,
    probable_commit,
    snapshot_gap,
    snapshots_expected_at,
)
from gradientmail_core.engine.publishing import Published
from gradientmail_core.engine.run import Bell, Board, Host, Run
from gradientmail_core.engine.sweeping import Sweeper
from gradientmail_core.events import (
    RoundCommitted,
    RoundLost,
    RoundTakenOver,
    SnapshotRefused,
)
from gradientmail_core.protocol.exchange import (
    Decided,
    Won,
    bounded_get,
    commit_round,
    create_once,
    get_section,
    newest_round,
    read_round,
)
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import ClaimKey, DeltaKey
from gradientmail_core.protocol.records import Claim, Refusal, RoundRecord, Section, parse_claim
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.payload import payload_bytes_max
from gradientmail_core.tensors.schema import FragmentLayout

CLAIMS_MOST = 1000
NEVER = float("inf")
UPLOAD_SMOOTHING = 0.3
LAST_CALL_SECONDS = 0.25


class Fragment:
    """The task and the state of one chain. ``deliver`` hands commits (or an overdue fragment) to the learner."""

    def __init__(
        self,
        host: Host,
        run: Run,
        board: Board,
        commit: Commit,
        deliver: Callable[[Message], None],
        hurry: Callable[[int, bool], None],
    ) -> None:
        self._host = host
        self._run = run
        self._board = board
        self._deliver = deliver
        self._hurry = hurry
        self._sweeper = Sweeper(host, run, board)
        self.layout = run.layouts[commit.head.fragment]
        self.head: Head = commit.head
        self.theta: Flat = commit.theta
        self.published: Published | None = None
        self.gathering = Gathering()
        self.started_at = host.clock.now()
        self.bell = board.bells.setdefault(commit.head.fragment, Bell())
        self._outer: tuple[str, tuple[Flat, ...]] | None = None
        self._quorum_known_at: float | None = None
        self._wanted_told = False
        self._upload_seconds = 0.0
        self._committed_about: float | None = None
        self._ours: Decided | None = None
        self._announce()

    @property
    def round(self) -> int:
        """The open round."""
        return self.head.next_round(self._run.fragments)

    @property
    def closing(self) -> bool:
        """True if this node is the named closer of the open round."""
        return self.head.closer == self._host.node

    async def run(self) -> None:
        """Follow and close, round after round, until cancelled."""
        while True:
            decided = await (self._close() if self.closing else self._follow())
            await self._advance(decided)

    @property
    def settling(self) -> bool:
        """True while this node closes a round that others already contributed to."""
        return self.closing and bool(self.gathering.accepted)

    def uploaded(self, seconds: float) -> None:
        """Learn how long an upload of this fragment takes."""
        self._upload_seconds += UPLOAD_SMOOTHING * (seconds - self._upload_seconds)

    async def hint(self) -> None:
        """Leave a hint at the newest commit, if this node closes the fragment."""
        if self.closing:
            await self._sweeper.hint(self.head, force=True)

    async def tidy(self) -> None:
        """Remove what is left of closed rounds, if this node closes the fragment."""
        if self.closing:
            await self._sweeper.tidy(self.head.fragment)

    def _announce(self) -> None:
        self._board.closers[self.head.fragment] = self.head.closer
        self._board.open_rounds[self.head.fragment] = self.round

    async def caught_up(self) -> bool:
        """Ask once for a newer commit than the head and adopt it; True if there was one."""
        state = await read_round(self._host.mailbox, self._run.id, self.round)
        if isinstance(state, Decided):
            await self._advance(state)
        return isinstance(state, Decided)

    def _unlock(self, now: float) -> None:
        """Keep nodes from waiting for each other for ever.

        A round that takes too long frees its place in ``in_flight``. While this node has such a round, it reports
        at once, without trained steps if need be, on every fragment on which another node has reported.
        """
        fragment = self.head.fragment
        own = self.published
        late_after = overdue_after(self.head, self._host.timeouts.lease)
        if own is not None and now >= own.at + late_after and fragment not in self._board.overdue:
            self._board.overdue.add(fragment)
            self._deliver(Overdue(fragment))
        reported = self._board.deltas.get(self.round, set()) | self.gathering.heard
        if self._board.overdue and own is None and not self._wanted_told and reported - {self._host.node}:
            self._wanted_told = True
            self._deliver(Wanted(fragment))

    # -- following -----------------------------------------------------------------------------------------

    async def _follow(self) -> Decided:
        attempts = 0
        asked_at = -NEVER
        while True:
            now = self._host.clock.now()
            self._unlock(now)
            ask_at = self._ask_at(attempts, asked_at)
            if now >= ask_at:
                state = await read_round(self._host.mailbox, self._run.id, self.round)
                if isinstance(state, Decided):
                    self._committed_about = probable_commit(now, asked_at, self.head.interval)
                    return state
                attempts, asked_at = attempts + 1, now
                continue
            take_at, reason = self._takeover_at(now)
            if now >= take_at:
                claimed = await self._claimed(reason)
                if claimed is not None:
                    return claimed
                continue
            hurry_at = self._hurry_at()
            if now >= hurry_at:
                self._hurry(self.head.fragment, True)
                hurry_at = NEVER
            until = min(ask_at, take_at, hurry_at, now + self._host.timeouts.period)
            await self.bell.wait(self._host.clock, until - now)

    def _hurry_at(self) -> float:
        """When to publish early, because the round will probably close within one upload from then."""
        if self._run.settings.follow is False or self.head.interval is None or self.published is not None:
            return NEVER
        return self.head.seen + self.head.interval - self._upload_seconds

    def _ask_at(self, attempts: int, asked_at: float) -> float:
        if attempts:
            wait = min(commit_gap(attempts - 1, self.head.interval), self._host.timeouts.period)
            return asked_at + self._host.jitter(wait)
        if self._board.hints.get(self.head.fragment, 0) >= self.round:
            return -NEVER
        published_at = self.published.at if self.published is not None else None
        return commit_expected_at(self.head, published_at, self._host.timeouts.period)

    def _takeover_at(self, now: float) -> tuple[float, str]:
        """When this node should close the round in the closer's place, and why."""
        reason = self._board.gone(self.head.closer, max(self.head.seen, self.started_at))
        if self._board.leaving and self.published is None:
            return NEVER, ""
        candidates = self._board.candidates(self._run, self.head.fragment)
        others = [node for node in candidates if node not in (self.head.closer, self._host.node)]
        turn = len(others) if self._host.node not in candidates else candidates.index(self._host.node)
        patience = turn * max(self.head.estimates.sync, 1.0)
        if reason is not None:
            self._quorum_known_at = self._quorum_known_at or now
            return self._quorum_known_at + patience, reason
        late_at = self._late_at(now)
        return late_at + patience, "the round is overdue"

    def _late_at(self, now: float) -> float:
        known = set(self._board.deltas.get(self.round, ()))
        if self.published is not None and self.published.round == self.round:
            known.add(self._host.node)
        if len(known) < self._needed():
            return NEVER
        if self._quorum_known_at is None:
            self._quorum_known_at = now
        return self._quorum_known_at + overdue_after(self.head, self._host.timeouts.lease)

    async def _claimed(self, reason: str) -> Decided | None:
        """Claim the round and close it; None if another node's claim stands."""
        claim = Claim(self._run.id, self._host.node, self._host.incarnation, self._host.nonce())
        round, previous = self.round, self.head.closer
        for number in range(CLAIMS_MOST):
            key = ClaimKey(round, number).path
            outcome = await create_once(self._host.mailbox, self._host.clock, key, claim.encoded())
            if isinstance(outcome, Won):
                self._board.claims[round].add(number)
                break
            holder = parse_claim(outcome.body, self._run.id)
            if isinstance(holder, Claim) and not self._claim_lapsed(holder):
                self._quorum_known_at = self._host.clock.now()
                return None
        state = await read_round(self._host.mailbox, self._run.id, round)
        if isinstance(state, Decided):
            return state
        self._host.emit(RoundTakenOver(self.head.fragment, round, previous, reason))
        return await self._close()

    def _claim_lapsed(self, holder: Claim) -> bool:
        if holder.node == self._host.node:
            return holder.incarnation != self._host.incarnation
        return self._board.gone(holder.node, self.started_at) is not None

    # -- closing -------------------------------------------------------------------------------------------

    async def _close(self) -> Decided:
        self.gathering = Gathering()
        fetching: dict[str, asyncio.Task[None]] = {}
        attempts = 0
        asked_at = -NEVER
        try:
            while True:
                now = self._host.clock.now()
                self._unlock(now)
                self.gathering = with_quorum(self.gathering, self._needed(), now, self._expected_at())
                closes = closes_at(self.gathering, self._live(), self._run.settings, self.head.estimates)
                if closes is not None and now >= closes:
                    await self._last_call(fetching)
                    break
                if self._board.hints.get(self.head.fragment, 0) >= self.round:
                    state = await read_round(self._host.mailbox, self._run.id, self.round)
                    if isinstance(state, Decided):
                        return state
                ask_at = self._snapshots_ask_at(attempts, asked_at, closes)
                if now >= ask_at:
                    self._fetch_missing(fetching)
                    attempts, asked_at = attempts + 1, now
                    continue
                until = min(ask_at, closes if closes is not None else NEVER, now + self._host.timeouts.period)
                if self.gathering.accepted and self._expected_at() > now:
                    until = min(until, self._expected_at())
                await self.bell.wait(self._host.clock, until - now)
        finally:
            for task in fetching.values():
                task.cancel()
        return await self._commit()

    async def _last_call(self, fetching: dict[str, asyncio.Task[None]]) -> None:
        """Ask once more for what is missing, so that nothing is left out that was there when the grace ended."""
        self._fetch_missing(fetching)
        asking = [task for task in fetching.values() if not task.done()]
        if asking:
            await self._first_of(asking, max(self.head.estimates.sync, LAST_CALL_SECONDS))

    async def _first_of(self, tasks: list[asyncio.Task[None]], seconds: float) -> None:
        """Until all ``tasks`` ended, at most ``seconds``."""
        timer = asyncio.ensure_future(self._host.clock.sleep(seconds))
        together = asyncio.gather(*tasks, return_exceptions=True)
        try:
            await asyncio.wait({timer, together}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    def _live(self) -> tuple[str, ...]:
        return self._board.live_learners()

    def _needed(self) -> int:
        return min(self._run.settings.quorum_size, max(len(self._live()), 1))

    def _expected_at(self) -> float:
        return self.head.seen + (self.head.interval or 0.0)

    def _snapshots_ask_at(self, attempts: int, asked_at: float, closes: float | None) -> float:
        own = self.published if self.published is not None and self.published.round == self.round else None
        if own is not None and self._host.node not in self.gathering.heard and own.at > asked_at:
            return -NEVER
        if attempts:
            grace = closes - self.gathering.quorum_at if closes is not None and self.gathering.quorum_at else None
            wait = min(snapshot_gap(attempts - 1, self.head.interval, grace), self._host.timeouts.period)
            return asked_at + self._host.jitter(wait)
        listed = bool(self._board.deltas.get(self.round))
        return snapshots_expected_at(self.head, own.at if own else None, listed, self._host.timeouts.period)

    def _fetch_missing(self, fetching: dict[str, asyncio.Task[None]]) -> None:
        expected = set(self._live()) | self._board.deltas.get(self.round, set())
        if self.published is not None and self.published.round == self.round:
            expected.add(self._host.node)
        for node in sorted(expected - self.gathering.heard):
            if node not in fetching or fetching[node].done():
                fetching[node] = asyncio.ensure_future(self._fetch(node, self.round))

    async def _fetch(self, node: str, round: int) -> None:
        body = await self._snapshot_body(node, round)
        if body is None:
            return
        head = self.head
        verdict = await self._host.clock.compute(lambda: judged(body, node, round, head, self._run))
        if node in self.gathering.heard:
            return
        self._board.evident([node])
        now = self._host.clock.now()
        if isinstance(verdict, Accepted):
            self.gathering = with_accepted(self.gathering, verdict, now)
        else:
            self.gathering = with_refused(self.gathering, verdict)
        self.bell.ring()

    async def _snapshot_body(self, node: str, round: int) -> bytes | bytearray | None:
        if node == self._host.node and self.published is not None and self.published.round == round:
            return self.published.body
        if node == self._host.node:
            return None
        limit = payload_bytes_max(self.layout, codec_named(self._run.settings.delta_codec))
        return await bounded_get(self._host.mailbox, DeltaKey(round, node).path, limit)

    async def _commit(self) -> Decided:
        started = self._host.clock.now()
        head, round = self.head, self.round
        gathering = without_outliers(self.gathering, head.version + 1, head.estimates)
        result = await self._merged(gathering)
        if isinstance(result, Decided):
            return result
        if result is None:
            gathering = _void(gathering)
            sections: tuple[Section, ...] = head.sections
        else:
            sections = await put_sections(self._host, self.layout, self._outer_layout(), round, result)
        grace = grace_seconds(self._run.settings, head.estimates, step_seconds(gathering, head.estimates))
        record = round_record(
            self._host,
            self._run,
            head,
            gathering=gathering,
            sections=sections,
            estimates=blended(head.estimates, gathering, grace=grace, sync=self._host.clock.now() - started),
            cosine=result.cosine if result is not None else None,
            newest_step=max(self._board.newest_step, self._board.clock()),
            closer=self._next_closer(),
        )
        decided = await commit_round(self._host.mailbox, self._host.clock, record)
        await self._settled(decided, record, result, started)
        return decided

    async def _merged(self, gathering: Gathering) -> Merger | Decided | None:
        if not gathering.accepted:
            return None
        outer = await self._outer_state()
        if isinstance(outer, Decided):
            return outer
        theta, head = self.theta, self.head
        return await self._host.clock.compute(lambda: merger(self._run, head, theta, outer, gathering.accepted))

    async def _settled(self, decided: Decided, record: RoundRecord, result: Merger | None, started: float) -> None:
        if decided.record != record:
            self._host.emit(RoundLost(self.head.fragment, record.round, decided.record.node))
            if result is not None:
                await self._sweeper.discard(record.sections, keep=decided.record.sections)
            return
        self._ours = decided
        if result is not None:
            self.theta = result.theta
            self._outer = (decided.digest, result.outer)
        elif self._outer is not None:
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
        return next_closer(
            self._host.node,
            run=self._run.id,
            fragment=self.head.fragment,
            closers=self._board.closers,
            live=self._board.live_closers(),
            leaving=self._board.leaving,
        )

    def _outer_layout(self) -> FragmentLayout:
        return outer_layout(self.layout, self._run.settings.outer.state_names())

    async def _outer_state(self) -> tuple[Flat, ...] | Decided:
        """The outer optimizer's state at the head: from memory, from the store, or zeros for version 0.

        If its payload cannot be read, another node may have gone on: then its commit. If nobody has for the lease
        time-out, the state is lost and starts anew.
        """
        if self._outer is not None and self._outer[0] == self.head.digest:
            return self._outer[1]
        names = self._run.settings.outer.state_names()
        section = self.head.section("outer")
        give_up_at = self._host.clock.now() + self._host.timeouts.lease
        while section is not None and self._host.clock.now() < give_up_at:
            flat = await get_section(self._host.mailbox, self._host.clock, section, self._outer_layout())
            if not isinstance(flat, Rejected):
                return tuple(flat[i * self.layout.size : (i + 1) * self.layout.size] for i in range(len(names)))
            self._board.ignored(section.key, flat.reason)
            state = await read_round(self._host.mailbox, self._run.id, self.round)
            if isinstance(state, Decided):
                return state
            await self._host.clock.sleep(self._host.timeouts.period)
        return tuple(np.zeros(self.layout.size, np.float32) for _ in names)

    # -- going on ------------------------------------------------------------------------------------------

    async def _advance(self, decided: Decided) -> None:
        """Make ``decided`` the head, with its parameters, and tell the learner."""
        previous = self.head
        seen, self._committed_about = self._committed_about, None
        head = succeeded(previous, decided, self._run.fragments, self._host.clock.now() if seen is None else seen)
        if self._ours is None or self._ours.digest != decided.digest:
            head, self.theta = await self._loaded(head)
        self.head = head
        self._announce()
        self._board.newest_step = max(self._board.newest_step, head.newest_step)
        self._board.evident(participant.node for participant in decided.record.participants)
        merged, refusal = self._own_verdict(decided.record)
        self._hurry(head.fragment, False)
        self._deliver(Commit(head, self.theta, merged, refusal))
        self._quorum_known_at = None
        self._wanted_told = False
        self._board.overdue.discard(head.fragment)
        if decided.record.node == self._host.node and self._ours is not None:
            await self._sweeper.committed(head, sorted(self.gathering.heard))
        self._ours = None

    def _own_verdict(self, record: RoundRecord) -> tuple[bool, str | None]:
        own, self.published = self.published, None
        if own is None:
            return False, None
        if any(participant.snapshot == own.digest for participant in record.participants):
            return True, None
        reasons: Mapping[str, str] = {refusal.snapshot: refusal.reason for refusal in record.refusals}
        reason = reasons.get(own.digest, "the round closed before it arrived")
        self._host.emit(SnapshotRefused(self._host.node, self.head.fragment, own.round, reason))
        return False, reasons.get(own.digest)

    async def _loaded(self, head: Head) -> tuple[Head, Flat]:
        """The parameters of ``head``, or of a newer commit if its payload is already gone."""
        while True:
            section = head.section("theta")
            if section is not None and section == self.head.section("theta"):
                return head, self.theta
            reason = "no parameters are named"
            if section is not None:
                theta = await get_section(self._host.mailbox, self._host.clock, section, self.layout)
                if not isinstance(theta, Rejected):
                    return head, theta
                reason = theta.reason
            newer = await newest_round(
                self._host.mailbox, self._run.id, head.fragment, self._run.fragments, head.version
            )
            if newer is not None:
                head = succeeded(head, newer, self._run.fragments, self._host.clock.now())
                continue
            self._board.ignored(section.key if section else "tape", reason)
            await self._host.clock.sleep(min(1.0, self._host.timeouts.period))


def _void(gathering: Gathering) -> Gathering:
    """The gathering when nothing of it can be merged: what was accepted is refused as not finite."""
    for snapshot in gathering.accepted:
        record = snapshot.record
        refusal = Refusal(record.node, record.incarnation, snapshot.digest, "nonfinite")
        gathering = with_refused(gathering, refusal)
    return Gathering(refused=gathering.refused, heard=gathering.heard, first_at=gathering.first_at)
