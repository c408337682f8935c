"""Who is alive, and who makes progress, judged from beats alone.

A beat is one object; its key says node, beat number, state and optimizer step, so one listing tells
everything. Age is counted on the observer's monotonic clock from the moment a newer beat (or other
evidence) was first seen: no two machines' clocks are compared, and a lease that vanishes from a
listing keeps its last beat and its age, because absence proves nothing. Leaving is an act (state
``x``). Life and progress are separate facts: a node in state ``t`` whose step stands still for
``progress_timeout`` is alive but not waited for until it moves again.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from gradientmail_core.protocol.fields import Rejected, canonical_json, guarded, parse_object
from gradientmail_core.protocol.keys import LeaseKey, LeaseState

LEARNING: frozenset[LeaseState] = frozenset({"t", "w", "l", "v"})
TRAINING: frozenset[LeaseState] = frozenset({"t", "l"})
JOINING_LEASES = 10
SILENT_LEASES = 2
LEASE_LONGEST = 1024
_FRAMEWORK = re.compile(r"[a-z0-9_.-]{1,40}\Z", re.ASCII)
CLOSING: frozenset[LeaseState] = frozenset({"t", "w", "e", "s"})
_BEAT = attrgetter("beat")
ROUNDING_SECONDS = 1e-3  # far more than adding clock readings rounds off, far less than any time-out


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long silence is tolerated, in seconds. Beat plus LIST period stay at a third of ``lease``."""

    lease: float = 120.0
    progress: float = 300.0

    @property
    def period(self) -> float:
        """Seconds between beats, and between listings: 20 by default; where silence is tolerated for longer, more."""
        return self.lease / 6


@dataclass(frozen=True, slots=True)
class Presence:
    """A node as last seen: its newest beat, and when life and progress were last evident here."""

    lease: LeaseKey
    seen: float
    progressed: float


@dataclass(frozen=True, slots=True)
class Roster:
    """Every node of which a beat was ever seen: its newest beat, in name order, and its :class:`Presence`'s times.

    Facts of one kind lie together, because a listing brings signs of life of a thousand nodes at once.
    """

    beats: Mapping[str, LeaseKey] = field(default_factory=dict)
    seen: Mapping[str, float] = field(default_factory=dict)
    progressed: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Mapping[str, Presence]) -> "Roster":
        """The roster of these nodes."""
        ordered = dict(sorted(nodes.items()))
        return cls(
            {node: presence.lease for node, presence in ordered.items()},
            {node: presence.seen for node, presence in ordered.items()},
            {node: presence.progressed for node, presence in ordered.items()},
        )

    def get(self, node: str) -> Presence | None:
        """A node as last seen, or None for one that never was."""
        beat = self.beats.get(node)
        return None if beat is None else Presence(beat, self.seen[node], self.progressed[node])

    @property
    def nodes(self) -> dict[str, Presence]:
        """Every node as last seen, in name order."""
        return {node: Presence(beat, self.seen[node], self.progressed[node]) for node, beat in self.beats.items()}


def lease_body(framework: str) -> bytes:
    """What a beat's object holds, for people alone: what its node trains with. Nodes read only keys."""
    return canonical_json({"framework": framework} if framework else {})


def framework_in(body: bytes) -> str:
    """What :func:`lease_body` was given; empty for anything else."""

    def parse() -> str:
        return parse_object(body, LEASE_LONGEST).text("framework", _FRAMEWORK)

    found = guarded(parse)
    return "" if isinstance(found, Rejected) else found


def observed(roster: Roster, leases: Iterable[LeaseKey], now: float, timeouts: Timeouts) -> Roster:
    """The roster after a listing at ``now``: only beats newer than those known change anything.

    A node that is gone may come back as another incarnation (``tag``) whose beats begin anew, because its old
    leases were removed meanwhile.
    """
    newest = _newest(roster, tuple(leases))
    beats: dict[str, LeaseKey] = {}
    moved: list[str] = []
    for node, lease in newest.items():
        known = roster.beats.get(node)
        if not _is_news(roster, known, lease, now, timeouts):
            continue
        beats[node] = lease
        if known is None or (known.state, known.step, known.tag) != (lease.state, lease.step, lease.tag):
            moved.append(node)
    if not beats:
        return roster
    every = {**roster.beats, **beats}
    return Roster(
        every if len(every) == len(roster.beats) else dict(sorted(every.items())),
        {**roster.seen, **dict.fromkeys(beats, now)},
        {**roster.progressed, **dict.fromkeys(moved, now)},
    )


def _newest(roster: Roster, leases: Sequence[LeaseKey]) -> dict[str, LeaseKey]:
    """Each node's highest listed beat, where that may change anything; of equal ones the first listed.

    All beats of a node are looked at if some are another incarnation's, whose beats may begin anew.
    """
    beats = roster.beats
    others = [lease for lease in leases if beats.get(lease.node) is not lease]
    mixed = {lease.node for lease in others if lease.node not in beats or lease.tag != beats[lease.node].tag}
    news = [lease for lease in others if lease.node not in mixed and lease.beat > beats[lease.node].beat]
    if mixed:
        news += [lease for lease in leases if lease.node in mixed]
    news.reverse()
    return {lease.node: lease for lease in sorted(news, key=_BEAT)}


def _is_news(roster: Roster, known: LeaseKey | None, lease: LeaseKey, now: float, timeouts: Timeouts) -> bool:
    """Whether a listed beat takes the place of the ``known`` one."""
    if known is None or lease.beat > known.beat:
        return True
    return lease.tag != known.tag and not (known.state != "x" and now - roster.seen[known.node] < timeouts.lease)


def evident(roster: Roster, nodes: Iterable[str], now: float) -> Roster:
    """The roster after anything that ``nodes`` published was seen: a sign of life and of progress."""
    times = dict.fromkeys([node for node in nodes if node in roster.beats], now)
    return Roster(roster.beats, {**roster.seen, **times}, {**roster.progressed, **times}) if times else roster


def heard(roster: Roster, nodes: Iterable[str], now: float) -> Roster:
    """The roster after ``nodes`` closed a round: a sign of life, and none that their trainers get on."""
    times = dict.fromkeys([node for node in nodes if node in roster.beats], now)
    return Roster(roster.beats, {**roster.seen, **times}, roster.progressed) if times else roster


def is_alive(presence: Presence, now: float, timeouts: Timeouts) -> bool:
    """True until the node left or was silent for the lease time-out."""
    return presence.lease.state != "x" and now - presence.seen < timeouts.lease


def absent(roster: Roster, now: float, timeouts: Timeouts) -> set[str]:
    """Nodes that left or were silent for the lease time-out."""
    left = {node for node, beat in roster.beats.items() if beat.state == "x"}
    return left | _since(roster.seen, now, timeouts.lease)


def live_learners(roster: Roster, now: float, timeouts: Timeouts) -> tuple[str, ...]:
    """Nodes that a quorum waits for, in name order: alive, training or waiting, and getting on."""
    silent, still = _since(roster.seen, now, timeouts.lease), _since(roster.progressed, now, timeouts.progress)
    return tuple(
        node
        for node, beat in roster.beats.items()
        if beat.state in LEARNING and node not in silent and (node not in still or beat.state not in TRAINING)
    )


@dataclass(frozen=True, slots=True)
class Census:
    """The live learners as counted once: the same ``until`` then, but for newer ``beats`` and evidence of others."""

    learners: tuple[str, ...]
    members: frozenset[str]
    beats: Mapping[str, LeaseKey]
    until: float

    def holds(self, roster: Roster, now: float) -> bool:
        """True if counting anew would give the same, as far as beats and time go."""
        return self.beats is roster.beats and now < self.until


def census_of(roster: Roster, now: float, timeouts: Timeouts) -> Census:
    """The live learners now."""
    learners = live_learners(roster, now, timeouts)
    silent_at = min((roster.seen[node] for node in learners), default=now) + timeouts.lease
    still_at = min((roster.progressed[node] for node in learners), default=now) + timeouts.progress
    return Census(learners, frozenset(learners), roster.beats, min(silent_at, still_at) - ROUNDING_SECONDS)


def _since(times: Mapping[str, float], now: float, seconds: float) -> set[str]:
    """Nodes whose time is ``seconds`` ago or more."""
    if not times or now - min(times.values()) < seconds:
        return set()
    return {node for node, time in times.items() if not now - time < seconds}


def live_closers(roster: Roster, now: float, timeouts: Timeouts) -> tuple[str, ...]:
    """Nodes that may close rounds, in name order; only dedicated syncers while one lives."""
    silent = _since(roster.seen, now, timeouts.lease)
    able = [node for node, beat in roster.beats.items() if beat.state in CLOSING and node not in silent]
    syncers = [node for node in able if roster.beats[node].state == "s"]
    return tuple(syncers or able)


def joining(roster: Roster, now: float, timeouts: Timeouts) -> bool:
    """True while a node is loading the committed parameters, so payloads it may need must stay.

    For at most :data:`JOINING_LEASES` lease time-outs from its first beat. Payloads can wait, so it may be silent for
    two lease time-outs before it is given up: a listing may miss its beats for once.
    """
    longest, silence = JOINING_LEASES * timeouts.lease, SILENT_LEASES * timeouts.lease
    return any(
        beat.state == "j" and now - roster.progressed[node] < longest and now - roster.seen[node] < silence
        for node, beat in roster.beats.items()
    )
