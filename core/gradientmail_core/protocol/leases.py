"""Who is alive, and who makes progress, judged from beats alone.

A beat is one object; its key says node, beat number, state and optimizer step, so one listing tells
everything. Age is counted on the observer's monotonic clock from the moment a newer beat (or other
evidence) was first seen: no two machines' clocks are compared, and a lease that vanishes from a
listing keeps its last beat and its age, because absence proves nothing. Leaving is an act (state
``x``). Life and progress are separate facts: a node in state ``t`` whose step stands still for
``progress_timeout`` is alive but not waited for until it moves again.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gradientmail_core.protocol.fields import Rejected, canonical_json, guarded, parse_object
from gradientmail_core.protocol.keys import LeaseKey, LeaseState

LEARNING: frozenset[LeaseState] = frozenset({"t", "w", "l", "v"})
TRAINING: frozenset[LeaseState] = frozenset({"t", "l"})
JOINING_LEASES = 10
SILENT_LEASES = 2
LEASE_LONGEST = 1024
_FRAMEWORK = re.compile(r"[a-z0-9_.-]{1,40}\Z", re.ASCII)
CLOSING: frozenset[LeaseState] = frozenset({"t", "w", "e", "s"})


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long silence is tolerated, in seconds. Beat plus LIST period stay at a third of ``lease``."""

    lease: float = 120.0
    progress: float = 300.0

    @property
    def period(self) -> float:
        """Seconds between beats, and between listings."""
        return min(20.0, self.lease / 6)


@dataclass(frozen=True, slots=True)
class Presence:
    """A node as last seen: its newest beat, and when life and progress were last evident here."""

    lease: LeaseKey
    seen: float
    progressed: float


@dataclass(frozen=True, slots=True)
class Roster:
    """Every node of which a beat was ever seen, in name order."""

    nodes: Mapping[str, Presence] = field(default_factory=lambda: MappingProxyType({}))


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
    newest: dict[str, LeaseKey] = {}
    for lease in leases:
        if lease.node not in newest or lease.beat > newest[lease.node].beat:
            newest[lease.node] = lease
    changed: dict[str, Presence] = {}
    for node, lease in newest.items():
        known = roster.nodes.get(node)
        presence = _beaten(known, lease, now, timeouts)
        if presence is not known:
            changed[node] = presence
    return _with(roster, changed)


def _beaten(known: Presence | None, lease: LeaseKey, now: float, timeouts: Timeouts) -> Presence:
    if known is None or (lease.tag != known.lease.tag and not is_alive(known, now, timeouts)):
        return Presence(lease, now, now)
    if lease.beat <= known.lease.beat:
        return known
    moved = (lease.state, lease.step, lease.tag) != (known.lease.state, known.lease.step, known.lease.tag)
    return Presence(lease, now, now if moved else known.progressed)


def evident(roster: Roster, nodes: Iterable[str], now: float) -> Roster:
    """The roster after anything that ``nodes`` published was seen: a sign of life and of progress."""
    known = ((node, roster.nodes.get(node)) for node in nodes)
    return _with(roster, {node: Presence(found.lease, now, now) for node, found in known if found is not None})


def heard(roster: Roster, nodes: Iterable[str], now: float) -> Roster:
    """The roster after ``nodes`` closed a round: a sign of life, and none that their trainers get on."""
    known = ((node, roster.nodes.get(node)) for node in nodes)
    return _with(roster, {node: replace(found, seen=now) for node, found in known if found is not None})


def _with(roster: Roster, changed: Mapping[str, Presence]) -> Roster:
    if not changed:
        return roster
    nodes = {**roster.nodes, **changed}
    if len(nodes) > len(roster.nodes):
        nodes = dict(sorted(nodes.items()))
    return Roster(MappingProxyType(nodes))


def is_alive(presence: Presence, now: float, timeouts: Timeouts) -> bool:
    """True until the node left or was silent for the lease time-out."""
    return presence.lease.state != "x" and now - presence.seen < timeouts.lease


def live_learners(roster: Roster, now: float, timeouts: Timeouts) -> tuple[str, ...]:
    """Nodes that a quorum waits for, in name order: alive, training or waiting, and getting on."""
    return tuple(
        node
        for node, presence in roster.nodes.items()
        if is_alive(presence, now, timeouts) and presence.lease.state in LEARNING and _moves(presence, now, timeouts)
    )


def _moves(presence: Presence, now: float, timeouts: Timeouts) -> bool:
    return presence.lease.state not in TRAINING or now - presence.progressed < timeouts.progress


def live_closers(roster: Roster, now: float, timeouts: Timeouts) -> tuple[str, ...]:
    """Nodes that may close rounds, in name order; only dedicated syncers while one lives."""
    able = {
        node: presence.lease.state
        for node, presence in roster.nodes.items()
        if is_alive(presence, now, timeouts) and presence.lease.state in CLOSING
    }
    syncers = tuple(node for node, state in able.items() if state == "s")
    return syncers or tuple(able)


def joining(roster: Roster, now: float, timeouts: Timeouts) -> bool:
    """True while a node is loading the committed parameters, so payloads it may need must stay.

    For at most :data:`JOINING_LEASES` lease time-outs from its first beat. Payloads can wait, so it may be silent for
    two lease time-outs before it is given up: a listing may miss its beats for once.
    """
    longest, silence = JOINING_LEASES * timeouts.lease, SILENT_LEASES * timeouts.lease
    return any(
        presence.lease.state == "j" and now - presence.progressed < longest and now - presence.seen < silence
        for presence in roster.nodes.values()
    )
