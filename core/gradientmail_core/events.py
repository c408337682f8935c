"""What a node does, as values: one frozen dataclass for each thing that happened.

Callbacks receive every event in the order it happened, on the engine's thread; one that raises is
logged and harms nothing. ``str(event)`` is the sentence a person reads.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

logger = logging.getLogger("gradientmail")

POISON_REASONS = frozenset({"nonfinite", "outlier", "corrupt", "schema", "run", "unsigned"})


@dataclass(frozen=True, slots=True)
class RunCreated:
    """This node wrote the run's manifest."""

    run: str
    url: str
    fragments: int
    elements: int

    def __str__(self) -> str:
        return f"created run {self.run[:8]} at {self.url}: {self.elements:,} parameters in {self.fragments} fragments"


@dataclass(frozen=True, slots=True)
class RunJoined:
    """This node holds the newest committed parameters and starts to train."""

    run: str
    node: str
    step: int
    rounds: int
    live: tuple[str, ...]

    def __str__(self) -> str:
        others = ", ".join(self.live) or "no other node"
        return f"{self.node} joined run {self.run[:8]} at step {self.step} after {self.rounds} rounds, with {others}"


@dataclass(frozen=True, slots=True)
class RunResumed:
    """This node goes on from a checkpoint; ``kept`` of ``fragments`` keep what was trained since their last commit."""

    run: str
    node: str
    step: int
    kept: int
    fragments: int

    def __str__(self) -> str:
        moved = self.fragments - self.kept
        rest = f", {moved} of {self.fragments} fragments start from newer commits" if moved else ""
        return f"{self.node} goes on in run {self.run[:8]} at step {self.step}{rest}"


@dataclass(frozen=True, slots=True)
class RunWaited:
    """The node waits for others before it trains, or for a round before it goes on."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class NodeAppeared:
    """A node was seen alive for the first time, or again."""

    node: str

    def __str__(self) -> str:
        return f"{self.node} is here"


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A node left, or showed no sign of life for the lease time-out."""

    node: str
    left: bool

    def __str__(self) -> str:
        return f"{self.node} left" if self.left else f"{self.node} shows no sign of life and is not waited for"


@dataclass(frozen=True, slots=True)
class SnapshotPublished:
    """A fragment's delta is in the mailbox; ``seconds`` from the copy to the end of the upload."""

    fragment: int
    round: int
    steps: int
    tokens: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"published round {self.round}: {self.steps} steps, {self.bytes:,} bytes in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class SnapshotRefused:
    """A snapshot did not enter its round; ``node`` wrote it, ``reason`` is the record's word."""

    node: str
    fragment: int
    round: int
    reason: str

    def __str__(self) -> str:
        return f"round {self.round} went on without the snapshot of {self.node}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RoundCommitted:
    """This node closed a round; ``seconds`` from the decision to the commit."""

    fragment: int
    round: int
    participants: tuple[str, ...]
    refused: tuple[str, ...]
    cosine: float | None
    seconds: float

    def __str__(self) -> str:
        who = ", ".join(self.participants) or "nobody (void)"
        agreement = "" if self.cosine is None else f", cosine {self.cosine:.2f}"
        return f"closed round {self.round} with {who}{agreement} in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class RoundLost:
    """Another node's commit of the round came first; this node goes on from it."""

    fragment: int
    round: int
    winner: str

    def __str__(self) -> str:
        return f"{self.winner} committed round {self.round} first"


@dataclass(frozen=True, slots=True)
class RoundTakenOver:
    """This node closes a round in the place of the named closer."""

    fragment: int
    round: int
    closer: str
    reason: str

    def __str__(self) -> str:
        return f"took over round {self.round} from {self.closer}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SyncerElected:
    """This node was elected the run's syncer and holds its training (``serving``), or trains again."""

    node: str
    serving: bool

    def __str__(self) -> str:
        if self.serving:
            return f"{self.node} was elected syncer: it holds its training and closes rounds"
        return f"{self.node} is no longer the syncer and trains again"


@dataclass(frozen=True, slots=True)
class BatchShareChanged:
    """This node's share of the batch that ``nodes`` nodes share is now so many samples of the ``whole``."""

    node: str
    samples: int
    whole: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.node} takes {self.samples} of the {self.whole} samples that {self.nodes} nodes share"


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The node's whole state after its ``step``-th step lies in the mailbox for its next process."""

    node: str
    step: int
    size: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.node} handed its state after step {self.step} off: {self.size:,} bytes in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class StateOmitted:
    """The node's hand-offs do not hold ``part`` of its state; its next process starts that anew."""

    node: str
    part: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} hands its state off without {self.part}: {self.reason}"


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The node's state after its ``step``-th step could not be handed off; the hand-off before it still lies there."""

    node: str
    step: int
    cause: str

    def __str__(self) -> str:
        return f"{self.node} could not hand its state after step {self.step} off: {self.cause}"


@dataclass(frozen=True, slots=True)
class HandoffSkipped:
    """The node's hand-off ``name`` cannot be gone on from; ``instead`` says from what the node starts."""

    node: str
    name: str
    reason: str
    instead: str

    def __str__(self) -> str:
        return f"the hand-off of {self.node} cannot be used ({self.name}: {self.reason}): {self.instead}"


@dataclass(frozen=True, slots=True)
class FragmentAligned:
    """A commit was written into the model; ``merged`` says whether this node's snapshot is in it.

    ``tokens`` were merged in the round by everyone; ``participants`` counts their snapshots.
    """

    fragment: int
    round: int
    step: int
    participants: int
    tokens: int
    merged: bool
    cosine: float | None

    def __str__(self) -> str:
        own = "" if self.merged else ", without this node's"
        return f"aligned with round {self.round} at step {self.step}: {self.participants} snapshots{own}"


@dataclass(frozen=True, slots=True)
class TokensBooked:
    """What became of the tokens this node had trained for a fragment, when a commit was written into the model.

    ``merged`` are in ``round``, ``carried`` stay with the node for the next one, ``dropped`` are lost, by cause.
    """

    fragment: int
    round: int
    merged: int
    carried: int
    dropped: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        lost = "".join(f", {tokens:,} dropped ({cause})" for cause, tokens in self.dropped)
        return f"round {self.round}: {self.merged:,} tokens merged, {self.carried:,} carried{lost}"


@dataclass(frozen=True, slots=True)
class ObjectIgnored:
    """Something in the mailbox is not what its key says; reported once for each key."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"ignored {self.key}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PayloadSkipped:
    """Committed parameters could not be read for the lease time-out; this node goes on from the version before."""

    fragment: int
    round: int
    reason: str

    def __str__(self) -> str:
        return f"the parameters of round {self.round} are lost ({self.reason}): going on from the version before"


@dataclass(frozen=True, slots=True)
class PayloadRestored:
    """This node wrote a committed payload again that another could not read."""

    fragment: int
    round: int
    key: str

    def __str__(self) -> str:
        return f"wrote a payload of round {self.round} again, which the store had lost: {self.key}"


@dataclass(frozen=True, slots=True)
class StoreStalled:
    """The store has not answered for ``seconds``; requests are repeated and training goes on."""

    seconds: float
    cause: str

    def __str__(self) -> str:
        return f"the mailbox has not answered for {self.seconds:.0f} s ({self.cause}); trying again"


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The node left the run; ``reason`` is empty for an ordinary close."""

    node: str
    rounds: int
    reason: str

    def __str__(self) -> str:
        return f"{self.node} left after {self.rounds} rounds" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class RoundMixed:
    """A gossip node took its outer step at the end of ``round``.

    ``partners`` are those whose gradients are in it, ``mixed`` counts the fragments whose mixed start had arrived;
    the node waited ``seconds`` for gradients.
    """

    round: int
    step: int
    steps: int
    partners: tuple[str, ...]
    mixed: int
    seconds: float

    def __str__(self) -> str:
        whom = ", ".join(self.partners) or "nobody's gradients"
        return f"ended round {self.round} at step {self.step}: mixed {self.mixed} starts, with {whom}"


@dataclass(frozen=True, slots=True)
class Rejoined:
    """A gossip node was two rounds or more behind: it goes on in ``round`` from the newest mean, without momentum."""

    round: int
    steps: int

    def __str__(self) -> str:
        return f"too far behind: going on in round {self.round} from the newest mean, {self.steps} steps given up"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How far the nodes of a gossip run are apart at the start of ``round``, as its roster says.

    ``l2`` is the root mean square over parameters of the distance from the nodes' mean, ``js`` the Jensen-Shannon
    distance of their outputs; None where it is not known. ``strong`` says that Mix2 is strengthened in this round.
    """

    round: int
    l2: float | None
    js: float | None
    strong: bool

    def __str__(self) -> str:
        known = [f"{name} {value:.3g}" for name, value in (("L2", self.l2), ("JS", self.js)) if value is not None]
        return f"round {self.round}: nodes apart by {' and '.join(known) or 'nobody knows how much'}" + (
            ", mixing more" if self.strong else ""
        )


Event: TypeAlias = (
    RunCreated
    | RunJoined
    | RunResumed
    | RunWaited
    | NodeAppeared
    | NodeGone
    | SnapshotPublished
    | SnapshotRefused
    | RoundCommitted
    | RoundLost
    | RoundTakenOver
    | SyncerElected
    | BatchShareChanged
    | HandedOff
    | StateOmitted
    | HandoffFailed
    | HandoffSkipped
    | FragmentAligned
    | TokensBooked
    | ObjectIgnored
    | PayloadSkipped
    | PayloadRestored
    | StoreStalled
    | SessionEnded
    | RoundMixed
    | Rejoined
    | Disagreement
)
Callback: TypeAlias = Callable[[Event], None]


def log_event(event: Event) -> None:
    """The default callback: what a person must know at INFO or WARNING, the rest at DEBUG."""
    match event:
        case SnapshotRefused(reason=reason) if reason not in POISON_REASONS:
            logger.info("%s", event)
        case (
            Rejoined()
            | SnapshotRefused()
            | RoundTakenOver()
            | ObjectIgnored()
            | PayloadSkipped()
            | PayloadRestored()
            | StoreStalled()
            | StateOmitted()
            | HandoffFailed()
            | HandoffSkipped()
        ):
            logger.warning("%s", event)
        case SyncerElected() | BatchShareChanged():
            logger.info("%s", event)
        case RunCreated() | RunJoined() | RunResumed() | RunWaited() | NodeAppeared() | NodeGone() | SessionEnded():
            logger.info("%s", event)
        case _:
            logger.debug("%s", event)


def emitter(callbacks: Sequence[Callback]) -> Callback:
    """One callback that passes an event to each of ``callbacks``, surviving those that raise."""

    def emit(event: Event) -> None:
        for callback in callbacks:
            try:
                callback(event)
            except Exception:
                logger.exception("A callback failed on %s", type(event).__name__)

    return emit
