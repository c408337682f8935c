"""The training thread's side of a node: step counters, due snapshots, and commits written into the model.

The state is a frozen value moved by pure functions; :class:`Learner` adds the two effects, copying a
fragment out and writing one in, both on the calling (training) thread. With nothing due a step is a counter
and two comparisons. Deltas are always against the parameters the fragment was last aligned with, which its
:class:`~gradientmail_core.engine.aligning.Aligner` holds, so no commit that arrives meanwhile can shift a
snapshot's base. Counters follow the parameters: what an alignment keeps is claimed by the next snapshot.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias, assert_never

import numpy as np

from gradientmail_core.algorithms.alignment import Kept
from gradientmail_core.engine.aligning import FRESH, Aligner, Memory, Outcome, Policy
from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.ledger import (
    LEFT,
    RESTARTED,
    ROLLED_BACK,
    UNKNOWN,
    Account,
    Books,
    Standing,
    accounts,
    booked,
    decided,
)
from gradientmail_core.events import TokensBooked
from gradientmail_core.protocol.records import RoundRecord
from gradientmail_core.tensors.error_feedback import FORGETTING_REASONS
from gradientmail_core.tensors.model import Flat, Model
from gradientmail_core.tensors.schema import FragmentLayout

NEVER = 2**62
STEP_TIMES_KEPT = 32
WARMUP_STEPS = 5
POISON = FORGETTING_REASONS
POISONED_MOST = 3
SEASONED = 1000
"""The age of a node that goes on from a checkpoint: its inner optimizer is as warm as ever."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A fragment as trained, on its way to the mailbox; ``values`` becomes the delta in place.

    ``record`` is the digest of the record it was trained from and ``base`` what the model held of the parameters
    committed there. A ``final`` one is the last of a node that leaves; ``age`` is how
    many commits of the fragment its node has aligned with since it joined, ``clock`` the node's round clock.
    """

    fragment: int
    version: int
    record: str
    base: Flat
    values: Flat
    steps: int
    tokens: int
    local_step: int
    step_seconds: float
    early: bool
    final: bool = False
    age: int = 0
    clock: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed version on its way into the model.

    ``merged`` says whether this node's snapshot is in it, and ``refusal`` why the record refused it, if it did.
    ``tokens`` are those the record counts for this node, whichever of its processes sent them; None for all claimed.
    ``skipped`` is the head's version if its parameters could not be read and ``theta`` are older ones.
    ``outcome`` is there for a node that guesses its next commit (``Eager``).
    """

    head: Head
    theta: Flat
    merged: bool
    refusal: str | None = None
    outcome: Outcome | None = None
    tokens: int | None = None
    skipped: int | None = None

    def counts_earlier(self, track: "Track") -> bool:
        """True if the round merged what an earlier process of this node had sent, and ``track`` holds it once more."""
        return not self.merged and bool(self.tokens) and track.inherited > 0


@dataclass(frozen=True, slots=True)
class Overdue:
    """The round of a fragment's outstanding snapshot takes too long: it no longer holds up other fragments."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Others wait for this node's word on a fragment while it waits for them: it reports now, whatever it has."""

    fragment: int


Message: TypeAlias = Commit | Overdue | Wanted


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A snapshot whose round is open, with the node's counters then and the tokens it claims.

    An overdue one is left out of ``in_flight``.
    """

    local_step: int
    tokens: int = 0
    overdue: bool = False
    claimed: int = 0


@dataclass(frozen=True, slots=True)
class Track:
    """One fragment in this model: the version it was aligned with, and the counters at that moment.

    ``inherited`` tokens since then were trained by an earlier process and are here by a checkpoint.
    """

    version: int
    record: str
    due: int
    step_then: int = 0
    tokens_then: int = 0
    outstanding: Outstanding | None = None
    inherited: int = 0


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Counters of a node: its own steps and tokens, and ``lead``, by which the run's clock is ahead of them.

    ``poisoned`` counts its snapshots refused in a row because of their values; ``books`` are the fragments' accounts.
    """

    tracks: tuple[Track, ...]
    local_step: int = 0
    tokens: int = 0
    lead: int = 0
    poisoned: int = 0
    books: tuple[Account, ...] = ()

    @property
    def global_step(self) -> int:
        """The round clock: never goes back, jumps forward to the clock of a record the node aligns with."""
        return self.local_step + self.lead


def started(heads: Sequence[Head]) -> LearnerState:
    """The state of a node that has just loaded ``heads``."""
    tracks = tuple(Track(head.version, head.digest, head.due) for head in heads)
    return LearnerState(tracks, lead=max(head.newest_step for head in heads), books=accounts(len(tracks)))


def stepped(state: LearnerState, tokens: int) -> LearnerState:
    """The state after one optimizer step on ``tokens`` tokens (or samples)."""
    return replace(state, local_step=state.local_step + 1, tokens=state.tokens + tokens)


def due(state: LearnerState, in_flight: int, early: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Fragments to publish now, longest due first: due (or ``early``), trained, and within ``in_flight``."""
    flying = sum(1 for track in state.tracks if track.outstanding is not None and not track.outstanding.overdue)
    ready = sorted(
        (track.due, fragment)
        for fragment, track in enumerate(state.tracks)
        if track.outstanding is None
        and state.local_step > track.step_then
        and (state.global_step >= track.due or fragment in early)
    )
    return tuple(fragment for _, fragment in ready[: max(in_flight - flying, 0)])


def next_due(state: LearnerState) -> int:
    """The local step at which :func:`due` may next hold by counting alone."""
    waiting = [max(track.due - state.lead, track.step_then + 1) for track in state.tracks if track.outstanding is None]
    return min(waiting, default=NEVER)


def blocked(state: LearnerState, overlap_steps: int | None) -> bool:
    """True while a snapshot is outstanding for as many steps as training may run ahead."""
    return overlap_steps is not None and any(
        track.outstanding is not None and state.local_step - track.outstanding.local_step >= overlap_steps
        for track in state.tracks
    )


def with_track(state: LearnerState, fragment: int, track: Track) -> LearnerState:
    """The state with one fragment's track replaced."""
    return replace(state, tracks=(*state.tracks[:fragment], track, *state.tracks[fragment + 1 :]))


def published(state: LearnerState, fragment: int) -> LearnerState:
    """The state after a snapshot of ``fragment`` was taken."""
    track = state.tracks[fragment]
    outstanding = Outstanding(state.local_step, state.tokens, claimed=state.tokens - track.tokens_then)
    return with_track(state, fragment, replace(track, outstanding=outstanding))


def overdue(state: LearnerState, fragment: int) -> LearnerState:
    """The state after the round of the fragment's outstanding snapshot was found overdue."""
    track = state.tracks[fragment]
    if track.outstanding is None:
        return state
    return with_track(state, fragment, replace(track, outstanding=replace(track.outstanding, overdue=True)))


def is_poison(refusal: str | None) -> bool:
    """True if a snapshot was refused because of its values: this node's training has gone wrong."""
    return refusal in POISON


def judged(state: LearnerState, merged: bool, refusal: str | None) -> LearnerState:
    """The state after a round's word on this node's snapshot: poison adds up until one is merged."""
    if is_poison(refusal):
        return replace(state, poisoned=state.poisoned + 1)
    return replace(state, poisoned=0) if merged else state


def aligned(state: LearnerState, head: Head, kept: Kept = Kept.NOTHING) -> LearnerState:
    """The state after a fragment was aligned with ``head``: counters start anew but for what was ``kept``.

    The clock jumps forward.
    """
    before = state.tracks[head.fragment]
    since = before.outstanding or Outstanding(state.local_step, state.tokens)
    steps = kept.of(state.local_step - before.step_then, state.local_step - since.local_step)
    tokens = kept.of(state.tokens - before.tokens_then, state.tokens - since.tokens)
    track = Track(head.version, head.digest, head.due, state.local_step - steps, state.tokens - tokens)
    lead = max(state.lead, head.newest_step - state.local_step)
    return replace(with_track(state, head.fragment, track), lead=lead)


def standing(state: LearnerState, fragment: int) -> Standing:
    """The fragment's tokens on which no round has decided."""
    track = state.tracks[fragment]
    out = track.outstanding
    since = track.tokens_then if out is None else max(track.tokens_then, out.tokens)
    return Standing(0 if out is None else out.claimed, state.tokens - since)


def books(state: LearnerState) -> tuple[Books, ...]:
    """Where the tokens of each fragment are; they are balanced at any moment."""
    stands = [standing(state, fragment) for fragment in range(len(state.tracks))]
    return tuple(
        Books(state.tokens, account.merged, stand.in_flight, stand.carried, dict(account.dropped))
        for account, stand in zip(state.books, stands, strict=True)
    )


def accounted(before: LearnerState, after: LearnerState, commit: Commit) -> tuple[LearnerState, TokensBooked]:
    """``after`` an alignment with ``commit``, with the tokens that were open ``before`` it in their account."""
    fragment, record = commit.head.fragment, commit.head.record
    stood, kept = standing(before, fragment), standing(after, fragment).carried
    merged, counted, cause = commit.merged, commit.tokens, commit.refusal
    if commit.counts_earlier(before.tracks[fragment]):
        merged, cause = True, RESTARTED
        counted = min(commit.tokens or 0, before.tracks[fragment].inherited)
    taken, dropped = decided(stood, merged=merged, counted=counted, kept=kept, cause=cause)
    account = booked(after.books[fragment], taken, dropped)
    books = (*after.books[:fragment], account, *after.books[fragment + 1 :])
    entry = TokensBooked(fragment, record.round if record is not None else 0, taken, kept, dropped)
    return replace(after, books=books), entry


def given_up(state: LearnerState, cause: str) -> LearnerState:
    """The state after all that is in no snapshot was dropped: nothing trained before is claimed any more."""
    dropped = (((cause, standing(state, fragment).carried),) for fragment in range(len(state.tracks)))
    after = tuple(
        booked(account, 0, [loss for loss in losses if loss[1]])
        for account, losses in zip(state.books, dropped, strict=True)
    )
    tracks = (replace(track, step_then=state.local_step, tokens_then=state.tokens) for track in state.tracks)
    return replace(state, tracks=tuple(tracks), books=after)


def rolled_back(state: LearnerState) -> LearnerState:
    """The state after the whole model was set back to its commits."""
    return given_up(state, ROLLED_BACK)


class Learner:
    """A model in training, seen by the engine. All methods but ``deliver`` run on the training thread."""

    def __init__(
        self,
        model: Model,
        layouts: Sequence[FragmentLayout],
        commits: Sequence[Commit],
        *,
        in_flight: int,
        overlap_steps: int | None,
        policy: Policy | None = None,
        publish: Callable[[Snapshot], None],
        applied: Callable[[Commit], None],
        now: Callable[[], float],
        delivered: Callable[[], None] = lambda: None,
        booked: Callable[[TokensBooked], None] = lambda entry: None,
        resumed: LearnerState | None = None,
        kept: frozenset[int] = frozenset(),
        flush: bool = False,
        memories: Sequence[Memory] = (),
    ) -> None:
        self._model = model
        self._layouts = layouts
        self._in_flight = in_flight
        self._overlap_steps = overlap_steps
        self._publish = publish
        self._applied = applied
        self._now = now
        self._delivered = delivered
        self._booked = booked
        self._inbox: deque[Message] = deque()
        self._finishing = False
        self._flush = flush
        self._ages = [SEASONED if resumed is not None else 0] * len(layouts)
        self._early: frozenset[int] = frozenset()
        self._spare: dict[int, deque[Flat]] = {layout.fragment: deque() for layout in layouts}
        self._step_times: deque[float] = deque(maxlen=STEP_TIMES_KEPT)
        self._last_step_at: float | None = None
        policy = policy or Policy()
        memories = memories or (FRESH,) * len(layouts)
        self._aligners = [
            Aligner(model, layout, commit.theta, policy, keep=commit.head.fragment in kept, memory=memory)
            for layout, commit, memory in zip(layouts, commits, memories, strict=True)
        ]
        self.state = resumed or started([commit.head for commit in commits])
        self._next_due = next_due(self.state)

    def deliver(self, message: Message) -> None:
        """Hand over what the engine has for the learner. Any thread."""
        self._inbox.append(message)
        self._delivered()

    def hurry(self, fragment: int, early: bool) -> None:
        """Publish a fragment before its due step, because its round is about to close; or no longer. Any thread."""
        self._early = self._early | {fragment} if early else self._early - {fragment}

    def returned(self, fragment: int, buffer: Flat) -> None:
        """Give a snapshot's buffer back for the next one. Any thread."""
        self._spare[fragment].append(buffer)

    def step(self, tokens: int) -> bool:
        """Count one optimizer step; write what was committed, publish what is due. True if anything was written."""
        self._time_step()
        self.state = stepped(self.state, tokens)
        changed = self.align() if self._inbox else False
        if self.state.local_step >= self._next_due or self._early:
            self._publish_due()
        return changed

    def align(self) -> bool:
        """Take in what was delivered; True if a commit was written into the model."""
        version = [track.version for track in self.state.tracks]
        while self._inbox:
            self._take(self._inbox.popleft())
        self._next_due = next_due(self.state)
        return version != [track.version for track in self.state.tracks]

    def _take(self, message: Message) -> None:
        match message:
            case Commit():
                if message.head.version > self.state.tracks[message.head.fragment].version:
                    self._write(message)
                    self._publish_rest()
            case Overdue():
                self.state = overdue(self.state, message.fragment)
            case Wanted():
                if self.state.tracks[message.fragment].outstanding is None and not self._finishing:
                    self._publish_one(message.fragment)
            case _:
                assert_never(message)

    def finish(self) -> None:
        """Publish nothing more, but for what was trained since each fragment's last round if that is to be flushed.

        What is outstanding still ends.
        """
        self._finishing = True
        self.align()
        self._publish_rest()

    def settle(self) -> None:
        """Write every delivered commit, then set the whole model to the newest commits it was aligned with."""
        self._flush = False
        self.align()
        for aligner in self._aligners:
            aligner.settle()
        self.state = given_up(self.state, LEFT)

    def committed(self) -> list[Commit]:
        """The newest commits that are here and not written into the model yet, in order of arrival."""
        return [message for message in tuple(self._inbox) if isinstance(message, Commit)]

    def anchors(self) -> list[Flat]:
        """For each fragment, the newest committed parameters that are here; do not change them."""
        newest = [aligner.base for aligner in self._aligners]
        for commit in self.committed():
            newest[commit.head.fragment] = commit.theta
        return newest

    @property
    def blocked(self) -> bool:
        """True while training must wait for a commit (``overlap_steps``)."""
        return blocked(self.state, self._overlap_steps)

    @property
    def poisoned(self) -> bool:
        """True once so many snapshots in a row were refused for their values that the node should leave."""
        return self.state.poisoned >= POISONED_MOST

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Fragments whose snapshot awaits its round."""
        return tuple(number for number, track in enumerate(self.state.tracks) if track.outstanding is not None)

    @property
    def versions(self) -> tuple[int, ...]:
        """For each fragment, the version the model was last aligned with."""
        return tuple(track.version for track in self.state.tracks)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """For each fragment, what its alignment goes by besides parameters."""
        return tuple(aligner.memory for aligner in self._aligners)

    @property
    def books(self) -> tuple[Books, ...]:
        """Where the tokens of each fragment are."""
        return books(self.state)

    def resume(self) -> None:
        """Forget the time since the last step, which was spent waiting and not training."""
        self._last_step_at = None

    def _time_step(self) -> None:
        now = self._now()
        if self._last_step_at is not None and self.state.local_step >= WARMUP_STEPS:
            self._step_times.append(now - self._last_step_at)
        self._last_step_at = now

    def _write(self, commit: Commit) -> None:
        fragment, record = commit.head.fragment, commit.head.record
        before, poison = self.state, is_poison(commit.refusal)
        kept = self._aligners[fragment].arrived(
            commit.theta,
            merged=commit.merged,
            cosine=record.cosine if record is not None else None,
            outcome=commit.outcome,
            spoilt=poison or commit.refusal == UNKNOWN or commit.counts_earlier(before.tracks[fragment]),
        )
        self.state, entry = accounted(before, aligned(before, commit.head, kept), commit)
        self.state = judged(self.state, commit.merged, commit.refusal)
        self._booked(entry)
        self._ages[fragment] += 1
        if poison:
            self._roll_back()
        self._applied(commit)

    def _roll_back(self) -> None:
        """Set the whole model to the commits and forget the optimizer's state, which the bad values are in."""
        for aligner in self._aligners:
            aligner.forget()
        self._model.reset_optimizer()
        self.state = rolled_back(self.state)

    def _publish_due(self) -> None:
        for fragment in due(self.state, self._in_flight, self._early):
            self._publish_one(fragment)
        self._next_due = next_due(self.state)
        if self._next_due <= self.state.local_step:
            self._next_due = self.state.local_step + 1

    def hand_in(self) -> None:
        """Publish what was trained since each fragment's last round, before the trainer holds for long."""
        self.align()
        self._publish_all()

    def _publish_rest(self) -> None:
        """Publish the last snapshots of a node that leaves."""
        if self._finishing and self._flush:
            self._publish_all()

    def _publish_all(self) -> None:
        """Publish every fragment that was trained and has no snapshot outstanding."""
        for fragment, track in enumerate(self.state.tracks):
            if track.outstanding is None and self.state.local_step > track.step_then:
                self._publish_one(fragment)

    def _publish_one(self, fragment: int) -> None:
        snapshot = self._snapshot(fragment)
        self._aligners[fragment].taken(snapshot.values, snapshot.version)
        self._publish(snapshot)
        self.state = published(self.state, fragment)

    def _snapshot(self, fragment: int) -> Snapshot:
        track = self.state.tracks[fragment]
        layout = self._layouts[fragment]
        spare = self._spare[fragment]
        values = spare.popleft() if spare else np.empty(layout.size, np.float32)
        self._model.read(layout, values)
        return Snapshot(
            fragment=fragment,
            version=track.version,
            record=track.record,
            base=self._aligners[fragment].held,
            values=values,
            steps=self.state.local_step - track.step_then,
            tokens=self.state.tokens - track.tokens_then,
            local_step=self.state.local_step,
            step_seconds=median(self._step_times) if self._step_times else 0.0,
            early=self.state.global_step < track.due,
            final=self._finishing,
            age=self._ages[fragment],
            clock=self.state.global_step,
        )


def merged_tokens(record: RoundRecord | None) -> int:
    """Tokens merged in one round, by everyone."""
    return sum(participant.tokens for participant in record.participants) if record is not None else 0
