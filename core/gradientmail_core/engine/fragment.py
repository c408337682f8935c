"""One fragment's chain as a node lives it: follow the commits, or close the rounds; never both at once.

Each fragment has a task of its own, so a slow payload of one never delays another. The task alternates: from
the head it either closes the next round (its node is the named closer, or has won a claim) or asks for the
commit. Whatever ends the round, the first commit in the tape is what every node goes on from.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from gradientmail_core.algorithms.outer import Reached
from gradientmail_core.engine.aligning import Outcome, Policy
from gradientmail_core.engine.chain import Head, succeeded
from gradientmail_core.engine.follower import Follower
from gradientmail_core.engine.gathering import Gathering
from gradientmail_core.engine.healing import ask
from gradientmail_core.engine.learner import Commit, is_poison
from gradientmail_core.engine.ledger import UNKNOWN, tallied
from gradientmail_core.engine.loading import Held, parameters
from gradientmail_core.engine.patience import Patience
from gradientmail_core.events import PayloadSkipped, SnapshotRefused
from gradientmail_core.protocol.exchange import (
    Decided,
    newest_round,
    read_roll,
    read_round,
)
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import tape_key
from gradientmail_core.protocol.records import RoundRecord
from gradientmail_core.tensors.model import Flat

ROLL_TRIES = 5


class Fragment(Follower):
    """The task of one chain."""

    async def run(self) -> None:
        """Follow and close, round after round, until cancelled."""
        while True:
            decided = await (self._close() if self.closing else self._follow())
            await self._advance(decided)

    async def caught_up(self) -> bool:
        """Ask once for a newer commit than the head and adopt it; True if there was one."""
        state = await read_round(self._host.mailbox, self._run.id, self.round)
        if isinstance(state, Decided):
            await self._advance(state)
        return isinstance(state, Decided)

    async def _advance(self, decided: Decided) -> None:
        """Make ``decided`` the head, with its parameters, and tell the learner."""
        previous, held = self.head, self.theta
        for slot in range(decided.slot):
            self._board.ignored(tape_key(decided.record.round, slot), "no record of this run")
        decided, known = await self._completed(decided)
        seen, self._committed_about = self._committed_about, None
        head = succeeded(previous, decided, self._run.fragments, self._host.clock.now() if seen is None else seen)
        skipped: int | None = None
        if self._ours is None or self._ours.digest != decided.digest:
            head, self.theta, skipped = await self._loaded(head)
        self._skipped = skipped
        self._whole_next = skipped is not None or (self._whole_next and head.section("theta") is None)
        self.head = head
        self._sweeper.saw(head)
        self._announce()
        self._board.newest_step = max(self._board.newest_step, head.newest_step)
        self._board.reported(decided.record.round, [who.node for who in decided.record.participants])
        self._board.closed(decided.record.node)
        self._board.tally = tallied(self._board.tally, decided.record)
        published = self.published is not None
        merged, refusal = self._own_verdict(decided.record, known)
        self._settle_feedback(
            {participant.snapshot for participant in decided.record.participants},
            kept=known and head.version == previous.version + 1 and not is_poison(refusal),
        )
        closed = decided.record.node == self._host.node and self._ours is not None
        if published or closed:
            self._board.signalled(merged or closed)
        self._board.rollbacks += is_poison(refusal)
        self._hurry(head.fragment, False)
        outcome, counted = await self._outcome(previous, held), self._counted(decided.record)
        self._deliver(Commit(head, self.theta, merged, refusal, outcome, counted))
        self.moved.set()
        self.moved = asyncio.Event()
        self._quorum_known_at = None
        self._wanted_told = False
        self._board.overdue.discard(head.fragment)
        if closed:
            await self._sweeper.committed(head, sorted(self.gathering.heard))
        self._ours = None
        self.gathering = Gathering()

    async def _completed(self, decided: Decided) -> tuple[Decided, bool]:
        """The record with all its participants; False if its roll was not to be had."""
        for _ in range(ROLL_TRIES):
            full = await read_roll(self._host.mailbox, decided.record)
            if not isinstance(full, Rejected):
                return replace(decided, record=full), True
            self._board.ignored(decided.record.roll.key if decided.record.roll else "", full.reason)
            await self._host.clock.sleep(self._host.jitter(1.0))
        return decided, False

    def _own_verdict(self, record: RoundRecord, known: bool) -> tuple[bool, str | None]:
        """Whether the record lists this node's snapshot, or why not; of one whose list is not known, neither."""
        own, self.published = self.published, None
        taken, self.taken = self.taken, None
        if own is None:
            if taken is not None:  # its encoding took longer than the round
                self._host.emit(SnapshotRefused(self._host.node, self.head.fragment, taken, "stale"))
            return False, None
        if not known:
            return False, UNKNOWN
        if any(participant.snapshot == own.digest for participant in record.participants):
            return True, None
        reasons: Mapping[str, str] = {refusal.snapshot: refusal.reason for refusal in record.refusals}
        reason = reasons.get(own.digest, "the round closed before it arrived")
        self._host.emit(SnapshotRefused(self._host.node, self.head.fragment, own.round, reason))
        return False, reasons.get(own.digest)

    def _counted(self, record: RoundRecord) -> int | None:
        """Tokens the record counts for this node, of whichever of its processes; None without a snapshot of it."""
        return next((who.tokens for who in record.participants if who.node == self._host.node), None)

    async def _outcome(self, previous: Head, held: Flat) -> Outcome | None:
        """What an eager node asks of the head that follows ``previous`` with the parameters ``held``."""
        if not Policy.of(self._run.settings).needs_outer:
            return None
        before, state = self._outer, await self._state_there()
        record = self.head.record
        own = [one.weight for one in record.participants if one.node == self._host.node] if record is not None else []
        if state is None or before is None or before[0] != previous.digest or record is None or not own:
            return None
        if record.final:  # it took another step than the optimizer's
            return None
        count, outer = len(record.participants), self._run.settings.outer
        there, here = Reached(held, before[1].arrays), Reached(self.theta, state)
        delta = await self._host.clock.compute(lambda: outer.delta_between(there, here, self.head.version, count))
        return Outcome(state, delta, own[0], count)

    async def _state_there(self) -> tuple[Flat, ...] | None:
        """The outer state at the head, read if need be; None if it was not found this time."""
        if self._outer is None or self._outer[0] != self.head.digest:
            state = await self._read_outer()
            if isinstance(state, Rejected):
                return None
            self._outer = (self.head.digest, state)
        return self._outer[1].arrays

    async def _loaded(self, head: Head) -> tuple[Head, Flat, int | None]:
        """The parameters of ``head``, or of a newer commit if its payload is already gone; and the version skipped.

        If nobody commits anything newer for the lease time-out, what this node holds stands for them, so that the
        next round is closed from the newest version that somebody could read.
        """
        patience: Patience | None = None
        held = Held(self.head.version, self.head.sections, self.theta)
        while True:
            began = self._host.clock.now()
            theta = await parameters(self._source, head.version, head.sections, held)
            if not isinstance(theta, Rejected):
                return head, theta, None
            newer = await newest_round(
                self._host.mailbox, self._run.id, head.fragment, self._run.fragments, head.version
            )
            if newer is not None:
                head, patience = succeeded(head, newer, self._run.fragments, self._host.clock.now()), None
                continue
            self._board.ignored(head.sections[0].key, theta.reason)
            round = head.next_round(self._run.fragments) - self._run.fragments
            if patience is None:
                await ask(self._host, round)
                patience = Patience.starting(self._host)
            patience = patience.missed(began)
            if patience.is_over:
                self._host.emit(PayloadSkipped(head.fragment, round, theta.reason))
                return head, self.theta, head.version
            await self._host.clock.sleep(min(1.0, self._host.timeouts.period))
