"""A run as its mailbox shows it to somebody who takes no part: nothing is written, and nobody notices.

Two listings tell what changes (``live/``) and what is stored (``blobs/``); the newest records tell the rest. The tape
is never listed as a whole, so the cost is the same at any age of the run. Ages are differences of the store's own
times: when it says that an object was written, and what its clock says now. A node that takes part judges life by its
own clock and beats; somebody who looks once has only these.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gradientmail_core.algorithms.gossip import NAME
from gradientmail_core.engine.gossip_roster import Listed
from gradientmail_core.engine.joining import Found, find_run
from gradientmail_core.engine.run import Host
from gradientmail_core.mailbox.base import Entry, Mailbox
from gradientmail_core.protocol.exchange import Decided, bounded_get, newest_round, read_round
from gradientmail_core.protocol.gossip import (
    GOSSIP,
    GossipKey,
    MeanKey,
    MeanRecord,
    RosterKey,
    RosterRecord,
    ShareKey,
    parse_gossip,
    parse_mean,
    parse_roster,
)
from gradientmail_core.protocol.keys import BLOBS, LIVE, DeltaKey, HeadKey, LeaseKey, parse_live, tape_key
from gradientmail_core.protocol.records import RECORD_LONGEST, RoundRecord

RECENT_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Presence:
    """A node's newest beat, and how many seconds ago it last wrote anything (None: the store does not say)."""

    lease: LeaseKey
    age: float | None

    def lives(self, lease_timeout: float) -> bool:
        """Whether it may still take part; one whose age is not known is taken to."""
        return self.lease.state != "x" and (self.age is None or self.age < lease_timeout)


@dataclass(frozen=True, slots=True)
class Chain:
    """A fragment's newest rounds: their records, newest first, and the records' ages in seconds, where known."""

    fragment: int
    records: tuple[RoundRecord, ...]
    fragments: int
    ages: tuple[float | None, ...]

    @property
    def age(self) -> float | None:
        """That of the newest record."""
        return self.ages[0] if self.ages else None

    @property
    def signs(self) -> Iterator[tuple[str, float | None]]:
        """Who closed, and whose snapshots came, with the record's age: a node that publishes need not beat."""
        for record, age in zip(self.records, self.ages, strict=True):
            yield record.node, age
            yield from ((each.node, age) for each in record.participants)
            yield from ((refusal.node, age) for refusal in record.refusals)

    @property
    def version(self) -> int:
        """Commits so far."""
        return self.records[0].round // self.fragments if self.records else 0


@dataclass(frozen=True, slots=True)
class Mixing:
    """A gossip run's newest roster, and of every fragment its newest mean in full with its age."""

    roster: RosterRecord | None
    means: tuple[tuple[MeanRecord | None, float | None], ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """What was read: ``objects`` are all under ``live/`` and ``blobs/``, ``now`` the store's clock, seconds since 1970.

    ``chains`` are empty in a gossip run, ``mixing`` is None in any other.
    """

    url: str
    found: Found
    now: float
    objects: tuple[Entry, ...]
    chains: tuple[Chain, ...]
    mixing: Mixing | None

    @property
    def fragments(self) -> int:
        """Number of fragments (P)."""
        return len(self.found.layouts)

    @property
    def presences(self) -> Mapping[str, Presence]:
        """Every node with a lease, by name."""
        return presences(self.objects, self.now, itertools.chain.from_iterable(chain.signs for chain in self.chains))

    def age(self, entry: Entry) -> float | None:
        """Seconds since an object was written, if the store says."""
        return None if entry.modified is None else max(self.now - entry.modified, 0.0)


async def surveyed(host: Host, now: float) -> Survey | None:
    """The run at the host's mailbox; None if there is none.

    ``now`` is the store's clock as far as it is known; an object from later than that moves it on. Raises
    :class:`RunMismatch` if the prefix holds something else.
    """
    found = await find_run(host)
    if found is None:
        return None
    live, blobs = await asyncio.gather(listing(host.mailbox, LIVE), listing(host.mailbox, BLOBS))
    objects = (*live, *blobs)
    now = max([now, *(entry.modified for entry in objects if entry.modified is not None)])
    gossips = found.manifest.algorithm.get("name") == NAME
    chains = () if gossips else await _chains(host, found, objects, now)
    mixing = await _mixing(host, found, objects, now) if gossips else None
    return Survey(host.mailbox.url, found, now, objects, chains, mixing)


async def listing(mailbox: Mailbox, prefix: str) -> tuple[Entry, ...]:
    """Every object below a prefix."""
    return tuple([entry async for entry in mailbox.list(prefix)])


def presences(objects: Iterable[Entry], now: float, wrote: Iterable[tuple[str, float | None]]) -> dict[str, Presence]:
    """Every node with a lease; whatever it published counts as a sign of life, and so does what it ``wrote``."""
    newest: dict[str, LeaseKey] = {}
    ages: defaultdict[str, list[float]] = defaultdict(list)
    for node, age in wrote:
        ages[node] += [] if age is None else [age]
    for entry in objects:
        key = parse_live(entry.key) or parse_gossip(entry.key)
        if isinstance(key, LeaseKey) and (key.node not in newest or key.beat > newest[key.node].beat):
            newest[key.node] = key
        if isinstance(key, LeaseKey | DeltaKey | ShareKey) and entry.modified is not None:
            ages[key.node].append(max(now - entry.modified, 0.0))
    return {node: Presence(lease, min(ages[node], default=None)) for node, lease in sorted(newest.items())}


async def _chains(host: Host, found: Found, objects: Iterable[Entry], now: float) -> tuple[Chain, ...]:
    hints: dict[int, int] = {}
    for entry in objects:
        key = parse_live(entry.key)
        if isinstance(key, HeadKey) and key.round % len(found.layouts) == key.fragment:
            hints[key.fragment] = max(key.round, hints.get(key.fragment, 0))
    fragments = range(len(found.layouts))
    records = await asyncio.gather(*(_recent(host, found, p, hints.get(p)) for p in fragments))
    written = await _written(host.mailbox, [record.round for each in records for record in each], now)
    return tuple(
        Chain(p, each, len(found.layouts), tuple(written.get(record.round) for record in each))
        for p, each in zip(fragments, records, strict=True)
    )


async def _recent(host: Host, found: Found, fragment: int, hint: int | None) -> tuple[RoundRecord, ...]:
    """The newest records of a chain, newest first; a few of each, so that all chains together make a dozen."""
    run, fragments = found.manifest.run, len(found.layouts)
    state = await read_round(host.mailbox, run, hint) if hint is not None else None
    newest = state if isinstance(state, Decided) else None
    version = newest.record.round // fragments if newest else 0
    newest = await newest_round(host.mailbox, run, fragment, fragments, version) or newest
    if newest is None:
        return ()
    oldest = newest.record.round - fragments * max(RECENT_ROUNDS // fragments - 1, 0)
    earlier = range(newest.record.round - fragments, max(oldest, fragments) - 1, -fragments)
    states = await asyncio.gather(*(read_round(host.mailbox, run, round) for round in earlier))
    return (newest.record, *(each.record for each in states if isinstance(each, Decided)))


async def _written(mailbox: Mailbox, rounds: Iterable[int], now: float) -> dict[int, float]:
    """How long ago the records of ``rounds`` were written: one listing of the tape's end."""
    by_directory: defaultdict[str, set[int]] = defaultdict(set)
    for round in rounds:
        by_directory[tape_key(round, 0).rpartition("/")[0]].add(round)
    ages: dict[int, float] = {}
    for directory, here in by_directory.items():
        before = tape_key(min(here), 0).rpartition("-")[0]
        async for entry in mailbox.list(f"{directory}/", after=before):
            name = entry.key.rpartition("/")[2].partition("-")[0]
            if name.isdecimal() and int(name) in here and entry.modified is not None:
                ages[int(name)] = max(now - entry.modified, 0.0)
    return ages


async def _mixing(host: Host, found: Found, objects: Iterable[Entry], now: float) -> Mixing:
    keys = {key: entry for entry in objects if (key := parse_gossip(entry.key)) is not None}
    listed, run, fragments = Listed(tuple(keys)), found.manifest.run, len(found.layouts)
    roster: RosterRecord | None = None
    for round in listed.rosters[:2]:
        body = await bounded_get(host.mailbox, RosterKey(round).path, RECORD_LONGEST)
        parsed = parse_roster(body or b"", run, round, fragments)
        if isinstance(parsed, RosterRecord):
            roster = parsed
            break
    return Mixing(roster, tuple([await _mean(host, run, keys, listed, p, now) for p in range(fragments)]))


async def _mean(
    host: Host, run: str, keys: Mapping[GossipKey, Entry], listed: Listed, fragment: int, now: float
) -> tuple[MeanRecord | None, float | None]:
    for round in listed.means(fragment)[:2]:
        key = MeanKey(round, fragment, full=True)
        parsed = parse_mean(await bounded_get(host.mailbox, key.path, RECORD_LONGEST) or b"", run, key)
        if isinstance(parsed, MeanRecord):
            written = keys[key].modified
            return parsed, None if written is None else max(now - written, 0.0)
    return None, None


def bytes_by_kind(survey: Survey) -> dict[str, int]:
    """What is stored, by what it is; of the records, which are not listed, about as much as the newest ones weigh."""
    sizes = {"payloads": 0, "snapshots": 0, "gossip": 0, "leases and the like": 0}
    for entry in survey.objects:
        kind = "leases and the like"
        if entry.key.startswith(BLOBS):
            kind = "payloads"
        elif entry.key.startswith(GOSSIP):
            kind = "gossip"
        elif isinstance(parse_live(entry.key), DeltaKey):
            kind = "snapshots"
        sizes[kind] += entry.size
    records = sum(len(chain.records[0].encoded()) * chain.version for chain in survey.chains if chain.records)
    return {kind: size for kind, size in (*sizes.items(), ("records, about", records)) if size}
