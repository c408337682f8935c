"""Who takes part in a round: one create-once roster, drawn up by the first node that starts it.

Partners, peers and averagers follow from the roster alone, so all members agree on them whatever each has seen of
the others. The roster decides nothing that could fork: a node that cannot read it, or finds garbage in its place,
trains that round by itself and mixes again in the next.

A node asks for the roster of the round it begins. Where there is none, a listing tells whether the run is elsewhere:
two rounds or more ahead, and the node goes on from the newest mean; behind, after the node was cut off and trained
on alone, and it takes the number everybody else is at. Otherwise it draws the roster up. Members that gave nothing
in the round before stay members but are silent: nobody waits for them, and they average nothing.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gradientmail_core.algorithms.mixing import All
from gradientmail_core.engine.election import rendezvous
from gradientmail_core.engine.gossip_shares import GossipRun
from gradientmail_core.engine.run import Board, Host
from gradientmail_core.protocol.exchange import Won, bounded_get, create_once
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.gossip import (
    GOSSIP,
    GossipKey,
    MeanKey,
    Member,
    RosterKey,
    RosterRecord,
    ShareKey,
    parse_gossip,
    parse_roster,
)
from gradientmail_core.protocol.leases import is_alive
from gradientmail_core.protocol.records import RECORD_LONGEST

BELIEVED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Listed:
    """The objects of gossip rounds in one listing; strangers' objects left out."""

    keys: tuple[GossipKey, ...] = ()

    @property
    def rosters(self) -> list[int]:
        """Rounds with a roster, newest first."""
        return sorted({key.round for key in self.keys if isinstance(key, RosterKey)}, reverse=True)

    def means(self, fragment: int) -> list[int]:
        """Rounds with a mean of the fragment in full, newest first."""
        found = {key.round for key in self.keys if isinstance(key, MeanKey) and key.full and key.fragment == fragment}
        return sorted(found, reverse=True)

    def givers(self, round: int) -> frozenset[str]:
        """Nodes that gave anything in a round."""
        return frozenset(key.node for key in self.keys if isinstance(key, ShareKey) and key.round == round)


@dataclass(frozen=True, slots=True)
class Probes:
    """What is known of the nodes' disagreement: root mean square over parameters, Jensen-Shannon distance."""

    l2: float | None = None
    js: float | None = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """The round's roster. ``listed`` is what its creator saw, None on all other nodes."""

    roster: RosterRecord
    listed: Listed | None = None


@dataclass(frozen=True, slots=True)
class Alone:
    """No roster that can be read: the node trains this round by itself."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ahead:
    """The run is at ``round``, two or more further than this node."""

    round: int


@dataclass(frozen=True, slots=True)
class Behind:
    """The run is at ``round``, and this node has counted further by itself."""

    round: int


Standing: TypeAlias = Agreed | Alone | Ahead | Behind


async def listed_gossip(host: Host, board: Board) -> Listed:
    """One listing of every object of gossip rounds."""
    keys: list[GossipKey] = []
    async for entry in host.mailbox.list(GOSSIP):
        key = parse_gossip(entry.key)
        if key is None:
            board.ignored(entry.key, "no key of this protocol")
        else:
            keys.append(key)
    return Listed(tuple(keys))


async def read_roster(host: Host, run: GossipRun, round: int) -> RosterRecord | Rejected | None:
    """The roster of a round; None if there is none (yet)."""
    body = await bounded_get(host.mailbox, RosterKey(round).path, RECORD_LONGEST)
    return None if body is None else parse_roster(body, run.id, round, len(run.layouts))


async def newest_roster(host: Host, run: GossipRun, rounds: Iterable[int], after: int = -1) -> int | None:
    """The newest of ``rounds`` (newest first) whose roster is one, among those after ``after``."""
    for asked, round in enumerate(rounds):
        if round <= after or asked >= BELIEVED_AT_ONCE:
            return None
        if isinstance(await read_roster(host, run, round), RosterRecord):
            return round
    return None


@dataclass(frozen=True, slots=True)
class Draft:
    """What the creator of a roster puts into it besides members and averagers."""

    probes: Probes = field(default_factory=Probes)
    finishing: bool = False


async def standing(host: Host, run: GossipRun, board: Board, round: int, draft: Draft) -> Standing:
    """Where this node stands at the start of ``round``: with its roster, or elsewhere."""
    found = await read_roster(host, run, round)
    if found is None:
        listed = await listed_gossip(host, board)
        newest = await newest_roster(host, run, listed.rosters)
        if newest is not None and newest > round + 1:
            return Ahead(newest)
        if newest is not None and (begun := _occupied(newest, listed)) < round - 1:
            return Behind(begun + 1)
        return await _created(host, run, board, round, draft, listed)
    if isinstance(found, Rejected):
        return Alone(f"the roster of round {round} is none ({found.reason})")
    if await read_roster(host, run, round + 2) is not None:
        newest = await newest_roster(host, run, (await listed_gossip(host, board)).rosters, round + 1)
        if newest is not None:
            return Ahead(newest)
    return Agreed(found)


def _occupied(newest: int, listed: Listed) -> int:
    """``newest``, or the last of the rounds right after it whose roster is garbage: nobody can draw those up again."""
    taken = frozenset(listed.rosters)
    while newest + 1 in taken:
        newest += 1
    return newest


async def _created(host: Host, run: GossipRun, board: Board, round: int, draft: Draft, listed: Listed) -> Standing:
    roster = drawn(host, run, board, round, draft, listed.givers(round - 1))
    body = roster.encoded()
    outcome = await create_once(host.mailbox, host.clock, RosterKey(round).path, body)
    if isinstance(outcome, Won):
        return Agreed(roster, listed)
    winner = parse_roster(outcome.body, run.id, round, len(run.layouts))
    if isinstance(winner, Rejected):
        return Alone(f"the roster of round {round} is none ({winner.reason})")
    return Agreed(winner)


def drawn(host: Host, run: GossipRun, board: Board, round: int, draft: Draft, givers: Collection[str]) -> RosterRecord:
    """The roster as this node would have it: everyone alive and getting on, this node included."""
    silent = _silent(board, givers, host.node)
    members = tuple(Member(node, tag, node in silent) for node, tag in sorted(_members(host, board).items()))
    active = [member.node for member in members if not member.silent]
    settings = run.settings
    strengthen, probes = settings.strengthen, draft.probes
    value = None if strengthen is None else (probes.js if strengthen.probe == "js" else probes.l2)
    return RosterRecord(
        run=run.id,
        round=round,
        node=host.node,
        nonce=host.nonce(),
        seed=host.nonce(),
        members=members,
        averagers=spread_out(run.id, len(run.layouts), active),
        mean=isinstance(settings.mix1, All) or draft.finishing or round % settings.mean_every == 0,
        strong=strengthen is not None and value is not None and value > strengthen.threshold,
        l2=probes.l2,
        js=probes.js,
    )


def _members(host: Host, board: Board) -> dict[str, str]:
    """Node and incarnation of everyone who may give something in the round."""
    now, learners = host.clock.now(), frozenset(board.live_learners())
    return {host.node: host.incarnation} | {
        node: presence.lease.tag
        for node, presence in board.roster.nodes.items()
        if node in learners or (presence.lease.state == "d" and is_alive(presence, now, host.timeouts))
    }


def _silent(board: Board, givers: Collection[str], me: str) -> frozenset[str]:
    """Those known before who gave nothing in the round before; nobody where nobody gave anything."""
    if not givers:
        return frozenset()
    return frozenset(node for node in board.roster.nodes if node not in givers and node != me)


def spread_out(run: str, fragments: int, nodes: Sequence[str]) -> tuple[str, ...]:
    """An averager for each fragment: first in rendezvous order among those with the fewest fragments so far."""
    held = dict.fromkeys(nodes, 0)
    chosen: list[str] = []
    for fragment in range(fragments):
        least = min(held.values())
        node = rendezvous(run, fragment, [node for node, count in sorted(held.items()) if count == least])[0]
        held[node] += 1
        chosen.append(node)
    return tuple(chosen)
