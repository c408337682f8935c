"""When a round closes, and with whom: quorum, grace, and the outlier rule, as pure functions.

A round closes once every live learner has reported, or once ``quorum_size`` snapshots are accepted and the
grace has run out. Grace gives slower learners the time that training ahead leaves (Decoupled DiLoCo's
adaptive grace): half of what remains of the steps that may run ahead, at most one gap between rounds.
"""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.protocol.records import Estimates, Refusal, SnapshotRecord
from gradientmail_core.tensors.encoded import Encoded

GRACE_SHARE = 0.5
OUTLIER_FACTOR = 10.0
OUTLIER_PEERS = 4
FIRST_VERSIONS = 3
ABSURD_FACTOR = 1000.0
BLEND = 0.1


@dataclass(frozen=True, slots=True)
class Accepted:
    """A snapshot that may be merged: its record, its digest, its delta as it is kept, and the delta's L2 norm.

    ``squares`` are the sums of squares of the delta's pieces, of which the norm is made and which the merge needs;
    ``at`` is when it was accepted (seconds, closer's clock).
    """

    record: SnapshotRecord
    digest: str
    delta: Encoded
    norm: float
    squares: tuple[float, ...] = ()
    at: float = field(default=math.inf, compare=False)

    @property
    def pace(self) -> float:
        """L2 norm per sqrt(steps), which steps of different number share."""
        return self.norm / math.sqrt(self.record.steps)


@dataclass(frozen=True, slots=True)
class Gathering:
    """What arrived for an open round, and when the first and the quorum did (seconds, closer's clock)."""

    accepted: tuple[Accepted, ...] = ()
    refused: tuple[Refusal, ...] = ()
    first_at: float | None = None
    quorum_at: float | None = None
    heard: frozenset[str] = field(default_factory=frozenset)

    @property
    def final(self) -> bool:
        """True if only nodes that leave take part."""
        return bool(self.accepted) and all(snapshot.record.final for snapshot in self.accepted)


def with_accepted(gathering: Gathering, snapshot: Accepted, now: float) -> Gathering:
    """The gathering after a snapshot was accepted. A leaving node's may come at any time and begins nothing."""
    begins = gathering.first_at is None and not snapshot.record.final
    return replace(
        gathering,
        accepted=(*gathering.accepted, replace(snapshot, at=now)),
        heard=gathering.heard | {snapshot.record.node},
        first_at=now if begins else gathering.first_at,
    )


def with_quorum(
    gathering: Gathering, quorum: int, now: float, expected_at: float, sound: Sequence[Accepted] | None = None
) -> Gathering:
    """The gathering with the moment of quorum noted, once there is one, of the ``sound`` snapshots if some are not.

    Snapshots taken early, to be in time for a round that others close, make no quorum among themselves before
    the round is expected: else each would bring the next one forward, and rounds would race ahead of training.
    """
    sound = gathering.accepted if sound is None else sound
    if gathering.quorum_at is not None or len(sound) < quorum:
        return gathering
    on_time = any(not snapshot.record.early for snapshot in sound)
    return replace(gathering, quorum_at=now) if on_time or now >= expected_at else gathering


def with_refused(gathering: Gathering, refusal: Refusal) -> Gathering:
    """The gathering after a snapshot was refused; its node has reported all the same."""
    return replace(gathering, refused=(*gathering.refused, refusal), heard=gathering.heard | {refusal.node})


def grace_seconds(settings: DiLoCo, estimates: Estimates, step_seconds: float) -> float:
    """Seconds to wait after quorum: ``grace_seconds``, or from what training ahead leaves.

    ``min(0.5 * max(ahead * step - (quorum + sync), 0), gap * step)`` with ``gap = H / P`` steps between rounds
    and ``ahead = min(in_flight * gap, overlap_steps)`` (Decoupled DiLoCo, section 4.2 of the digest).
    """
    if settings.grace_seconds is not None:
        return settings.grace_seconds
    gap = settings.sync_every / settings.fragments
    ahead = settings.in_flight * gap
    if settings.overlap_steps is not None:
        ahead = min(ahead, settings.overlap_steps)
    slack = max(ahead * step_seconds - (estimates.quorum + estimates.sync), 0.0)
    return min(GRACE_SHARE * slack, gap * step_seconds)


def step_seconds(gathering: Gathering, estimates: Estimates) -> float:
    """The round's median step time, or the chain's while nothing is accepted."""
    known = [snapshot.record.step_seconds for snapshot in gathering.accepted if snapshot.record.step_seconds > 0]
    return statistics.median(known) if known else estimates.step


def reached(gathering: Gathering, settings: DiLoCo, estimates: Estimates, now: float) -> int:
    """The newest round clock of the nodes that take part, as far as they should have trained on by ``now``.

    The fastest node publishes first, and the round goes on for the grace: with its clock as it was then, the others
    would stay as far behind it as the grace is long. At most a cycle is added, and what ``overlap_steps`` allows; who
    leaves trains no more.
    """
    step, most = step_seconds(gathering, estimates), settings.sync_every
    if settings.overlap_steps is not None:
        most = min(most, settings.overlap_steps)

    def clock(snapshot: Accepted) -> int:
        idle = step <= 0 or snapshot.record.final
        since = 0 if idle else int(min(max(now - snapshot.at, 0.0) / step, most))
        return snapshot.record.clock + since

    return max(map(clock, gathering.accepted), default=0)


def closes_at(gathering: Gathering, live: Collection[str], settings: DiLoCo, estimates: Estimates) -> float | None:
    """When the round closes if nothing more arrives: ``-inf`` for now, None while it must wait.

    ``live`` are the learners a quorum waits for.
    """
    if gathering.heard and len(gathering.heard) >= len(live) and gathering.heard >= set(live):
        return -math.inf
    if gathering.quorum_at is None:
        return None
    return gathering.quorum_at + grace_seconds(settings, estimates, step_seconds(gathering, estimates))


def without_outliers(
    gathering: Gathering, version: int, estimates: Estimates, theta_norm: float = math.inf
) -> Gathering:
    """The gathering with snapshots of absurd norm refused, never the only one.

    A snapshot is an outlier if its norm per sqrt(steps) is over ten times the median of the accepted when there
    are four or more, else over ten times the chain's average. In a chain's first rounds nothing is known of what is
    usual and nodes may differ for good reasons: there it takes a norm a thousand times the others' lower median,
    whatever steps they claim, and more than ``theta_norm``, the L2 norm of the parameters it would move.
    """
    count = len(gathering.accepted)
    if count < 2:
        return gathering
    if version <= FIRST_VERSIONS:
        kept = tuple(one for one in gathering.accepted if not _is_absurd(one, gathering.accepted, theta_norm))
    else:
        usual = _median_pace(gathering) if count >= OUTLIER_PEERS else estimates.norm
        kept = tuple(one for one in gathering.accepted if usual <= 0 or one.pace <= OUTLIER_FACTOR * usual)
    return _with_outliers(gathering, kept) if 0 < len(kept) < count else gathering


def _median_pace(gathering: Gathering) -> float:
    return statistics.median(snapshot.pace for snapshot in gathering.accepted)


def _is_absurd(snapshot: Accepted, accepted: Sequence[Accepted], theta_norm: float) -> bool:
    others = [other.norm for other in accepted if other is not snapshot and other.norm > 0]
    return bool(others) and snapshot.norm > max(ABSURD_FACTOR * statistics.median_low(others), theta_norm)


def _with_outliers(gathering: Gathering, kept: tuple[Accepted, ...]) -> Gathering:
    """The gathering in which everything else that was accepted is refused as an outlier."""
    refused = tuple(
        Refusal(snapshot.record.node, snapshot.record.incarnation, snapshot.digest, "outlier")
        for snapshot in gathering.accepted
        if snapshot not in kept
    )
    return replace(gathering, accepted=kept, refused=(*gathering.refused, *refused))


def sound(
    gathering: Gathering, version: int, estimates: Estimates, theta_norm: float = math.inf
) -> tuple[Accepted, ...]:
    """The accepted snapshots that may make a quorum: those that are no outliers.

    A lone one is held against the chain's average, in the first rounds against a thousand times the parameters' norm
    where they are not zero: it is merged if nobody else comes, and nobody is left out for it.
    """
    if len(gathering.accepted) != 1:
        return without_outliers(gathering, version, estimates, theta_norm).accepted
    (lone,) = gathering.accepted
    if version <= FIRST_VERSIONS:
        return (lone,) if lone.norm <= ABSURD_FACTOR * (theta_norm or math.inf) else ()
    return (lone,) if lone.pace <= OUTLIER_FACTOR * (estimates.norm or math.inf) else ()


def shares(accepted: Sequence[Accepted], ramp: int = 0) -> tuple[float, ...]:
    """Each snapshot's weight, tokens^2 / steps, as a share of the round (quantity times quality), above 0.

    Who claims no token counts as one: merges take no weight of 0. In its first ``ramp`` rounds a node that has joined
    counts for 1, 2, ... of ``ramp + 1`` parts of that.
    """
    weights = [
        max(record.tokens, 1) ** 2 / record.steps * (min(record.age, ramp) + 1) / (ramp + 1)
        for record in (snapshot.record for snapshot in accepted)
    ]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def speeds(accepted: Sequence[Accepted]) -> dict[str, float]:
    """Samples per second of the nodes that timed their steps."""
    return {
        snapshot.record.node: snapshot.record.tokens / snapshot.record.steps / snapshot.record.step_seconds
        for snapshot in accepted
        if snapshot.record.step_seconds > 0 and snapshot.record.tokens > 0
    }


def blended(estimates: Estimates, gathering: Gathering, *, grace: float, sync: float) -> Estimates:
    """The chain's timings and usual norm after a round; the first values stand as they are."""

    def blend(old: float, new: float) -> float:
        return new if old <= 0 else old + BLEND * (new - old)

    if not gathering.accepted or gathering.first_at is None:
        return estimates
    quorum = max((gathering.quorum_at or gathering.first_at) - gathering.first_at, 0.0)  # readers take no less
    return Estimates(
        step=blend(estimates.step, step_seconds(gathering, estimates)),
        quorum=blend(estimates.quorum, quorum),
        sync=blend(estimates.sync, sync),
        grace=grace,
        norm=blend(estimates.norm, _median_pace(gathering)),
    )
