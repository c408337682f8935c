"""Gathering shares: ask for what is missing at growing intervals, wait for no one longer than is agreed.

A gathering ends when everyone who is waited for has given, is known to have left or fallen silent, has given
something that cannot be used, or when its time is over. Whatever is there by then is the result; a row is
renormalised over it.
"""

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gradientmail_core.clock import TimeOver
from gradientmail_core.engine.gossip_shares import GossipRun, Means, Vector, read_share
from gradientmail_core.engine.run import Board, Host
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.gossip import ShareKey
from gradientmail_core.protocol.keys import LEASES, LeaseKey, parse_live
from gradientmail_core.tensors.schema import FragmentLayout

FIRST_PAUSE_SECONDS = 0.05
PAUSE_GROWTH = 1.5
PAUSE_LEAST_SECONDS = 0.25
PAUSE_MOST_SECONDS = 5.0
PAUSE_UNKNOWN_SECONDS = 1.0
POLLS_PER_ROUND = 20
LEASES_SECONDS = 3.0
SMOOTHING = 0.3


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take here, smoothed: a round, and a mean from the round's start; seconds, None if unknown."""

    round: float | None = None
    mean: float | None = None

    @property
    def pause_most(self) -> float:
        """The longest pause between two looks at the same thing."""
        share = PAUSE_UNKNOWN_SECONDS if self.round is None else self.round / POLLS_PER_ROUND
        return min(max(share, PAUSE_LEAST_SECONDS), PAUSE_MOST_SECONDS)


def smoothed(known: float | None, seconds: float) -> float:
    """The estimate after one more measurement."""
    return seconds if known is None else known + SMOOTHING * (seconds - known)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a gathering is after: a key for each node, its incarnation (None: any), and who is waited for."""

    keys: Mapping[str, ShareKey]
    layout: FragmentLayout
    incarnations: Mapping[str, str]
    waited: Collection[str]


@dataclass(slots=True, eq=False, frozen=True)
class Surroundings:
    """What a gathering needs to know of the node it runs on."""

    host: Host
    run: GossipRun
    board: Board
    means: Means
    lease_listings: list[float] = field(default_factory=lambda: [0.0])


async def gathered(here: Surroundings, wanted: Wanted, seconds: float, pace: Pace) -> dict[str, Vector]:
    """Every usable share by node, in node order, after at most ``seconds``."""
    found: dict[str, Vector] = {}
    with contextlib.suppress(TimeOver):
        await here.host.clock.within(seconds, _gather(here, wanted, found, pace))
    return dict(sorted(found.items()))


async def _gather(here: Surroundings, wanted: Wanted, found: dict[str, Vector], pace: Pace) -> None:
    clock, started = here.host.clock, here.host.clock.now()
    missing, pause = dict(wanted.keys), FIRST_PAUSE_SECONDS
    while True:
        await asyncio.gather(*(_look(here, wanted, node, found, missing) for node in sorted(missing)))
        if not any(_awaited(here, wanted, node, started) for node in missing):
            return
        await clock.sleep(here.host.jitter(pause))
        pause = min(pause * PAUSE_GROWTH, pace.pause_most)
        await refresh_leases(here, clock.now() - started)


def _awaited(here: Surroundings, wanted: Wanted, node: str, started: float) -> bool:
    return node in wanted.waited and here.board.gone(node, started) is None


async def _look(
    here: Surroundings, wanted: Wanted, node: str, found: dict[str, Vector], missing: dict[str, ShareKey]
) -> None:
    key = missing[node]
    share = await read_share(here.host, here.run, here.means, key, wanted.layout, wanted.incarnations.get(node))
    if share is None:
        return
    missing.pop(node, None)
    if isinstance(share, Rejected):
        here.board.ignored(key.path, share.reason)
    else:
        found[node] = share
        here.board.evident([node])


async def refresh_leases(here: Surroundings, waited: float) -> None:
    """Look who left, now and then, while somebody is waited for."""
    now = here.host.clock.now()
    if waited < LEASES_SECONDS or now - here.lease_listings[0] < LEASES_SECONDS:
        return
    here.lease_listings[0] = now
    await list_leases(here.host, here.board)


async def list_leases(host: Host, board: Board) -> list[LeaseKey]:
    """One listing of all beats, taken in by the board."""
    keys: list[LeaseKey] = []
    async for entry in host.mailbox.list(LEASES):
        key = parse_live(entry.key)
        if isinstance(key, LeaseKey):
            keys.append(key)
        else:
            board.ignored(entry.key, "no key of this protocol")
    board.listed(keys)
    return keys
