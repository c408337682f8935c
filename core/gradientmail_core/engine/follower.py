"""Following a chain: ask for the next commit when it is due, and close the round in the closer's place if it must be.

A node takes over when the closer left or shows no sign of life, or when a quorum of snapshots is known and the
round is long overdue. Candidates wait in rendezvous order, and a claim keeps most of them from doing the same
work; but a claim decides nothing. The commit does, so taking over from a closer that is only slow harms nobody.
"""

from gradientmail_core.engine.closer import Closer
from gradientmail_core.engine.polling import (
    barrier_gap,
    commit_expected_at,
    commit_gap,
    overdue_after,
    probable_commit,
    snapshots_due_at,
)
from gradientmail_core.events import (
    RoundTakenOver,
)
from gradientmail_core.protocol.exchange import (
    Decided,
    Won,
    create_once,
    read_round,
)
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import ClaimKey
from gradientmail_core.protocol.records import Claim, parse_claim

CLAIMS_MOST = 1000
CLAIM_GAP_SECONDS = 1.0
NEVER = float("inf")


class Follower(Closer):
    """A chain view that follows other closers, and takes over from them."""

    async def _follow(self) -> Decided:
        attempts, looks = 0, 0
        asked_at = looked_at = -NEVER
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
            look_at = self._others_look_at(looks, looked_at)
            if now >= look_at:
                await self._look_for_others()
                looks, looked_at = looks + 1, now
                continue
            until = min(ask_at, take_at, hurry_at, look_at, now + self._host.timeouts.period)
            await self.bell.wait(self._host.clock, until - now)

    def _ask_at(self, attempts: int, asked_at: float) -> float:
        if (stands := self._stands_since()) is not None:
            wait = min(barrier_gap(max(asked_at - stands, 0.0)), self._host.timeouts.period)
            return max(asked_at, stands) + self._host.jitter(wait)
        if attempts:
            wait = commit_gap(attempts - 1, self.head.interval, asked_at - self._missed_since())
            return asked_at + self._host.jitter(min(wait, self._host.timeouts.period))
        if self._board.hints.get(self.head.fragment, 0) >= self.round or self._board.passed(self.round):
            return -NEVER
        published_at = self.published.at if self.published is not None else None
        return commit_expected_at(self.head, published_at, self._host.timeouts.period)

    def _missed_since(self) -> float:
        """Since when the commit is late; from this node's own snapshot on, training may wait for it, so anew."""
        own = self.published
        published_at = own.at if own is not None and own.round == self.round else None
        expected_at = commit_expected_at(self.head, published_at, self._host.timeouts.period)
        return expected_at if published_at is None else max(expected_at, published_at)

    def _others_look_at(self, looks: int, looked_at: float) -> float:
        """When to list who has published for the open round: only a node that follows a number of others asks."""
        if self._follows is None or self.published is not None or self.head.interval is None:
            return NEVER
        if len(self._followed()) >= self._follows:
            return NEVER
        if not looks:
            return snapshots_due_at(self.head, None)
        return looked_at + self._host.jitter(min(commit_gap(looks - 1, self.head.interval), self._host.timeouts.period))

    def _takeover_at(self, now: float) -> tuple[float, str]:
        """When this node should close the round in the closer's place, and why."""
        if self._run.manifest.store == "none":
            return NEVER, ""
        reason = self._board.gone(self.head.closer, max(self.head.seen, self.started_at))
        if not self._board.closes or (self._board.leaving and self.published is None):
            return NEVER, ""
        if reason is not None:
            take_at = self._quorum_known_at = self._quorum_known_at or now
        else:
            take_at = NEVER if self._run.one_closer else self._late_at(now)
        patience = self._patience() if now >= take_at else 0.0  # the order of candidates is asked for only then
        return take_at + patience, reason or "the round is overdue"

    def _patience(self) -> float:
        """How long this node leaves it to candidates before it to take over."""
        candidates = self._board.candidates(self._run, self.head.fragment)
        if self._host.node in candidates:
            turn = candidates.index(self._host.node)
        else:
            turn = len([node for node in candidates if node != self.head.closer])
        return turn * max(self.head.estimates.sync, CLAIM_GAP_SECONDS)

    def _late_at(self, now: float) -> float:
        known = set(self._board.deltas.get(self.round, ()))
        if self.published is not None and self.published.round == self.round:
            known.add(self._host.node)
        if now < self._expected_at():  # the last snapshots of who leaves may come at any time
            known -= self._board.leavers()
        if not self._is_quorum(len(known)):
            self._quorum_known_at = None
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
            if isinstance(holder, Rejected):
                self._board.ignored(key, holder.reason)
            if isinstance(holder, Claim) and not self._claim_lapsed(holder):
                self._quorum_known_at = self._host.clock.now() + max(self.head.estimates.sync, CLAIM_GAP_SECONDS)
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
