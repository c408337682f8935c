"""What every part of a node shares: the run as agreed (a frozen value) and the board of what was seen.

The board is the one place where a node keeps what it saw of the others: beats, announced snapshots, hints,
claims. It only ever grows more certain: a listing adds news and never takes a fact back.
"""

import asyncio
import contextlib
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.clock import Clock, TimeOver
from gradientmail_core.engine.election import rendezvous
from gradientmail_core.engine.ledger import Tally
from gradientmail_core.engine.roles import CLOSES_NOTHING
from gradientmail_core.events import Callback, NodeAppeared, NodeGone, ObjectIgnored
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.protocol.keys import ClaimKey, DeltaKey, HeadKey, LeaseKey, LiveKey, WantedKey
from gradientmail_core.protocol.leases import (
    LEARNING,
    Census,
    Roster,
    Timeouts,
    absent,
    census_of,
    evident,
    heard,
    is_alive,
    joining,
    live_closers,
    observed,
)
from gradientmail_core.protocol.link import Link
from gradientmail_core.protocol.records import Manifest
from gradientmail_core.tensors.schema import FragmentLayout

STRAYS_REMEMBERED = 10_000
LEASES_KEPT_TIMEOUTS = 10


@dataclass(frozen=True, slots=True)
class Host:
    """One process in a run: its name, its incarnation (new with each start), and its ways to the world.

    ``link`` knows how fast its uploads are, ``framework`` names what the node trains with, for people.
    """

    node: str
    incarnation: str
    mailbox: Mailbox
    clock: Clock
    random: random.Random
    timeouts: Timeouts
    emit: Callback
    link: Link = field(default_factory=Link)
    framework: str = ""

    def nonce(self) -> str:
        """Fresh hex for one attempt at a record."""
        return f"{self.random.getrandbits(64):016x}"

    def jitter(self, seconds: float) -> float:
        """``seconds`` give or take a tenth, so that nodes do not ask in step."""
        return seconds * self.random.uniform(0.9, 1.1)


@dataclass(frozen=True, slots=True)
class Run:
    """A run this node knows the manifest of. ``digest`` is the manifest's."""

    manifest: Manifest
    digest: str
    layouts: tuple[FragmentLayout, ...]
    settings: DiLoCo

    @property
    def id(self) -> str:
        """128 random bits that tell runs apart."""
        return self.manifest.run

    @property
    def one_closer(self) -> bool:
        """True if one node closes all fragments, because the store cannot decide races between several."""
        return self.manifest.store != "atomic"

    @property
    def fragments(self) -> int:
        """Number of fragments (P)."""
        return len(self.layouts)


class Bell:
    """Wakes one waiting task early."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake the waiter, now or at its next wait."""
        self._rung.set()

    async def wait(self, clock: Clock, seconds: float) -> None:
        """Until rung, at most ``seconds``."""
        if not self._rung.is_set():
            with contextlib.suppress(TimeOver):
                await clock.within(seconds, self._rung.wait())
        self._rung.clear()


@dataclass(slots=True)
class Board:
    """What this node has seen of the run.

    ``closers`` and ``open_rounds`` give, for each fragment, the closer its newest record names and the round after
    it; ``overdue`` are the fragments on which this node's own snapshot has waited too long; ``rollbacks`` counts the
    times this node's model was set back because of its values; ``closes`` says whether it ever closes rounds; ``tally``
    is what the rounds seen here say of each node's tokens; ``wanted`` are rounds of which somebody misses a payload.
    ``published_at`` is when this node wrote what others take for a sign of life, as far as it knows, and ``counted_at``
    when one did count; ``listed_at`` when it last listed ``live/``.
    """

    host: Host
    roster: Roster = field(default_factory=Roster)
    deltas: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    claims: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    hints: dict[int, int] = field(default_factory=dict)
    heads: list[HeadKey] = field(default_factory=list)
    leases: list[LeaseKey] = field(default_factory=list)
    closers: dict[int, str] = field(default_factory=dict)
    open_rounds: dict[int, int] = field(default_factory=dict)
    newest_step: int = 0
    leaving: bool = False
    closes: bool = True
    clock: Callable[[], int] = lambda: 0
    bells: dict[int, Bell] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    overdue: set[int] = field(default_factory=set)
    rollbacks: int = 0
    published_at: float = 0.0
    counted_at: float = 0.0
    strays: set[str] = field(default_factory=set)
    wanted: set[int] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)
    listed_at: float = -math.inf
    _census: Census | None = None
    _left: tuple[Mapping[str, LeaseKey], set[str]] | None = None

    def ring_all(self) -> None:
        """Wake every fragment's task."""
        for bell in self.bells.values():
            bell.ring()

    def live_learners(self) -> tuple[str, ...]:
        """Learners a quorum waits for."""
        now = self.host.clock.now()
        if self._census is None or not self._census.holds(self.roster, now):
            self._census = census_of(self.roster, now, self.host.timeouts)
        return self._census.learners

    def live_closers(self) -> tuple[str, ...]:
        """Nodes that may close rounds."""
        return live_closers(self.roster, self.host.clock.now(), self.host.timeouts)

    def candidates(self, run: Run, fragment: int) -> tuple[str, ...]:
        """Live closers in their order of claim on a fragment, or on all of them at once where one node closes all."""
        return rendezvous(run.id, 0 if run.one_closer else fragment, self.live_closers())

    def here(self) -> list[str]:
        """Nodes that train or wait, in name order."""
        out = absent(self.roster, self.host.clock.now(), self.host.timeouts)
        return [node for node, beat in self.roster.beats.items() if beat.state in LEARNING and node not in out]

    def dead_leases(self) -> list[LeaseKey]:
        """Listed leases of others that left, or have been silent for ten lease time-outs: they may go."""
        now, lease = self.host.clock.now(), self.host.timeouts.lease
        silent = {node: now - seen for node, seen in self.roster.seen.items() if now - seen > lease}
        silent.pop(self.host.node, None)
        return [
            key
            for key in (self.leases if silent else ())
            if silent.get(key.node, 0.0) > LEASES_KEPT_TIMEOUTS * lease
            or (key.node in silent and self.roster.beats[key.node].state == "x")
        ]

    def leavers(self) -> set[str]:
        """Nodes that are leaving, or have left; this one as soon as it knows."""
        if self._left is None or self._left[0] is not self.roster.beats:
            left = {node for node, beat in self.roster.beats.items() if beat.state in ("d", "x")}
            self._left = self.roster.beats, left
        others = self._left[1]
        return others | {self.host.node} if self.leaving else others

    def joining(self) -> bool:
        """True while some node may be loading payloads: its beats say so, or were looked for too long ago to tell."""
        now, timeouts = self.host.clock.now(), self.host.timeouts
        return now - self.listed_at > timeouts.lease / 2 or joining(self.roster, now, timeouts)

    def gone(self, node: str, unseen_since: float) -> str | None:
        """Why ``node`` cannot be waited for to close (it left, is silent, or never closes), or None while it may.

        A node of which no beat was ever seen is silent since ``unseen_since``.
        """
        presence = self.roster.get(node)
        now = self.host.clock.now()
        if presence is None:
            return "no sign of life" if now - unseen_since >= self.host.timeouts.lease else None
        if presence.lease.state == "x":
            return "it left"
        if presence.lease.state in CLOSES_NOTHING:
            return "it closes no rounds"
        return None if is_alive(presence, now, self.host.timeouts) else "no sign of life"

    def may_live(self, node: str, unseen_since: float) -> bool:
        """False once ``node`` left or was silent for the lease time-out (since ``unseen_since`` if never seen)."""
        presence, now = self.roster.get(node), self.host.clock.now()
        if presence is None:
            return now - unseen_since < self.host.timeouts.lease
        return is_alive(presence, now, self.host.timeouts)

    def evident(self, nodes: Iterable[str]) -> None:
        """Anything these nodes published was seen."""
        nodes = list(nodes)
        self.roster = evident(self.roster, nodes, self.host.clock.now())
        self._heard(nodes)

    def signalled(self, seen: bool) -> None:
        """A round is over for which this node published, or which it closed; a sign of life for others if ``seen``.

        Who goes by what nobody counts, late or refused, would be taken for dead.
        """
        if seen:
            self.published_at = self.counted_at = self.host.clock.now()
        else:
            self.published_at = self.counted_at

    def closed(self, node: str) -> None:
        """``node`` committed a round: it lives, whether or not its trainer gets on."""
        self.roster = heard(self.roster, [node], self.host.clock.now())
        self._heard([node])

    def _heard(self, nodes: Iterable[str]) -> None:
        """Count the learners anew if one of these was not among them."""
        if self._census is not None and not self._census.members.issuperset(nodes):
            self._census = None

    def reported(self, round: int, nodes: Iterable[str]) -> None:
        """Snapshots of these nodes were merged or can be. Each is a sign of life once, when it is first seen.

        It may have lain there for long, and a dead closer whose old snapshots counted again with every round that
        merges one would not be replaced. What is refused may be anybody's and is no sign.
        """
        fresh = [node for node in nodes if node not in self.deltas[round]]
        self.deltas[round].update(fresh)
        self.evident(fresh)

    def listed(self, keys: Iterable[LiveKey]) -> None:
        """Take in one listing of ``live/``; of closed rounds, what it shows stands for what earlier ones did."""
        self.listed_at = now = self.host.clock.now()
        for fragment in range(len(self.open_rounds)):
            self.forget_closed(fragment)
        keys = tuple(keys)
        self.leases = [key for key in keys if isinstance(key, LeaseKey)]
        self.heads, self.wanted = [], set()
        snapshots: defaultdict[int, set[str]] = defaultdict(set)
        for key in keys if len(self.leases) < len(keys) else ():
            match key:
                case LeaseKey():
                    pass
                case DeltaKey():
                    snapshots[key.round].add(key.node)
                case HeadKey():
                    self.heads.append(key)
                    self.hints[key.fragment] = max(self.hints.get(key.fragment, 0), key.round)
                case WantedKey():
                    self.wanted.add(key.round)
                case ClaimKey():
                    self.claims[key.round].add(key.number)
        fresh: set[str] = set()
        for round, nodes in snapshots.items():
            if self.is_open(round):
                fresh |= nodes - self.deltas[round]
            self.deltas[round] |= nodes
        self.roster = observed(self.roster, self.leases, now, self.host.timeouts)
        self.evident(sorted(fresh))
        self._report()
        self.ring_all()

    def is_open(self, round: int) -> bool:
        """True if the round is not closed yet, as far as this node knows."""
        fragments = len(self.open_rounds)
        return fragments > 0 and round >= self.open_rounds[round % fragments]

    def passed(self, round: int) -> bool:
        """True if a snapshot for a later round of the same fragment was seen: this one must be closed."""
        fragments = max(len(self.open_rounds), 1)
        return any(other > round and (other - round) % fragments == 0 for other in self.deltas)

    def passed_by(self, fragment: int, round: int) -> bool:
        """True if a hint, a claim or a later snapshot says that somebody else went on with a round."""
        return self.hints.get(fragment, 0) >= round or bool(self.claims.get(round)) or self.passed(round)

    def closed_rounds(self, fragment: int) -> list[int]:
        """Rounds of a fragment that are closed and of which something was still listed."""
        listed = self.deltas.keys() | self.claims.keys()
        return sorted(
            round for round in listed if round % len(self.open_rounds) == fragment and not self.is_open(round)
        )

    def ignored(self, key: str, reason: str) -> None:
        """Report an object that is not what its key says, once."""
        if key not in self.strays and len(self.strays) < STRAYS_REMEMBERED:
            self.strays.add(key)
            self.host.emit(ObjectIgnored(key[:200], reason))

    def own_beat(self, lease: LeaseKey) -> None:
        """This node wrote a beat."""
        self.roster = observed(self.roster, [lease], self.host.clock.now(), self.host.timeouts)

    def forget(self, round: int) -> None:
        """Drop what was seen of a closed round."""
        self.deltas.pop(round, None)
        self.claims.pop(round, None)

    def forget_closed(self, fragment: int) -> None:
        """Drop what was seen of the fragment's closed rounds; else it would add up in who never closes."""
        for round in self.closed_rounds(fragment):
            self.forget(round)

    def _report(self) -> None:
        out = absent(self.roster, self.host.clock.now(), self.host.timeouts)
        appeared = self.roster.beats.keys() - out - self.present - {self.host.node}
        vanished = self.present & out
        self.present = (self.present | appeared) - vanished
        for node in sorted(appeared | vanished):
            left = self.roster.beats[node].state == "x"
            self.host.emit(NodeAppeared(node) if node in appeared else NodeGone(node, left=left))
