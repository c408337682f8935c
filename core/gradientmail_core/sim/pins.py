"""Payloads that wait for a joiner: what was a head since a node began to join may not be removed until it has joined.

Who removes learns of a joiner by listings, which may be late, lost or incomplete. So a request to remove counts as
wrong only if, when it is made, the joiner's beats have come to the store without a gap, and have said all along that
it joins, for longer than :data:`NOTICED_SECONDS`. Nobody waits for a joiner for ever: it counts for
:data:`HELD_SECONDS` from its first beat.
"""

import json
import math
from dataclasses import dataclass

from gradientmail_core.protocol.keys import BLOBS, LeaseKey, parse_live

NOTICED_SECONDS = 10.0
"""Several listings of the swarm, of which each shows two beats of a joiner or, seldom, none."""
GAP_SECONDS = 3.0
"""Half a lease time-out of the swarm: a joiner silent for longer may be taken for dead soon."""
HELD_SECONDS = 50.0
"""Somewhat less than ten lease time-outs of the swarm, whose clocks drift."""

Life = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Joining:
    """When the first beat of a joiner came, since when they came without a gap, and when the last did."""

    first: float
    since: float
    last: float

    def beaten(self, now: float) -> "Joining":
        """After one more beat."""
        return Joining(self.first, self.since if now - self.last <= GAP_SECONDS else now, now)

    def is_noticed(self, now: float) -> bool:
        """True if whoever removes payloads must have seen it by now, and may not have given it up."""
        fresh = now - self.last <= GAP_SECONDS and now - self.first < HELD_SECONDS
        return fresh and now - self.since > NOTICED_SECONDS


class Pins:
    """Who began to join by its beats, and who has; which round names a payload, until when its version was a head."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._joins: dict[Life, Joining] = {}
        self._joined: set[Life] = set()
        self._named: dict[str, int] = {}
        self._led_until: dict[int, float] = {}

    def wrote(self, key: str, body: bytes, now: float) -> None:
        """An object appeared."""
        lease = parse_live(key)
        if isinstance(lease, LeaseKey):
            self._beaten(lease, now)
        elif key.startswith("tape/"):
            self._committed(body, now)

    def broken(self, key: str, now: float) -> str | None:
        """Whom a request to remove takes something from that it may be loading, if anybody."""
        round = self._named.get(key) if key.startswith(BLOBS) else None
        if round is None:
            return None
        for life, joining in self._joins.items():
            noticed = life not in self._joined and joining.is_noticed(now)
            if noticed and self._led_until.get(round, math.inf) > joining.since:
                return f"a payload of round {round} went that {life[0]} may be loading"
        return None

    def joining_since(self, recent: float) -> float:
        """When the first of those began to join of which a beat said so at ``recent`` or later; ``inf`` for nobody."""
        return min((joining.first for joining in self._joins.values() if joining.last >= recent), default=math.inf)

    def _beaten(self, lease: LeaseKey, now: float) -> None:
        life = (lease.node, lease.tag)
        if lease.state == "j":
            self._joins[life] = self._joins.get(life, Joining(now, now, now)).beaten(now)
        else:
            self._joined.add(life)

    def _committed(self, body: bytes, now: float) -> None:
        try:
            record = json.loads(body)
        except ValueError:
            return
        if isinstance(record, dict) and "sections" in record:
            self._led_until.setdefault(record["round"] - self._fragments, now)
            self._named.update((section["key"], record["round"]) for section in record["sections"])
