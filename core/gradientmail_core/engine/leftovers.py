"""What crashed processes left in a mailbox, and removing it, by somebody who takes no part in the run.

A running node sweeps as it commits, so what stays is what crashes left: payloads no record names, snapshots, claims
and shares of closed rounds, old beats, and what probes and half-created runs wrote. What may go is judged by the
chain of records, never by a listing alone:

* The payloads that the versions since a fragment's second newest whole one name stay, and the initial ones. Where
  one of those records was not found, all payloads of the fragment stay.
* Snapshots of open rounds stay: whoever closes the round next merges them. Payloads and claims of open rounds stay
  while a node lives, for its closer may be about to name them.
* While a node is joining, all payloads stay.
* A node's newest hand-off stays for ``handoff_age`` seconds, for whoever starts it again; older ones, and what lacks
  its record, stay only while the node lives.
* Of gossip rounds the same stays as when nodes sweep: the last three rounds and the two newest means of a fragment.
* Whatever was written less than ``min_age`` seconds ago by the store's clock stays, and what has no known age. So
  whoever holds on to a record, a listing or a lease that is minutes old finds what it needs.
* The tape, the manifest, and every object that is none of the protocol's stay always.

Records go before the payloads they name, so that no crash of the cleaner leaves a record of something missing; begun
again, it goes on.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradientmail_core.engine.gossip_roster import Listed
from gradientmail_core.engine.gossip_shares import payload_number
from gradientmail_core.engine.gossip_sweeping import MEANS_KEPT, ROUNDS_KEPT, kept_means, outlived
from gradientmail_core.engine.handoff import HANDOFFS, parse_handoff
from gradientmail_core.engine.run import Host
from gradientmail_core.engine.survey import Presence, Survey, listing, presences, surveyed
from gradientmail_core.engine.sweeping import named_since
from gradientmail_core.mailbox.base import Entry
from gradientmail_core.mailbox.examination import DOCTOR
from gradientmail_core.mailbox.probe import PROBES
from gradientmail_core.protocol.gossip import GOSSIP, GossipKey, MeanKey, parse_gossip
from gradientmail_core.protocol.keys import (
    BLOBS,
    LEASES,
    LIVE,
    ClaimKey,
    DeltaKey,
    HeadKey,
    LeaseKey,
    blob_round,
    is_blob_key,
    parse_live,
)
from gradientmail_core.protocol.leases import JOINING_LEASES
from gradientmail_core.protocol.recipes import UnitKey, parse_unit

Kind: TypeAlias = Literal[
    "payloads", "snapshots", "shares", "claims", "leases", "hints", "unit claims", "probes", "hand-offs"
]
Judgement: TypeAlias = tuple[Kind, Entry]

CREATION, UNITS = "creation/", "units/"
BEATS_KEPT = 2
DELETED_AT_ONCE = 16
HANDOFF_AGE = 30 * 86_400.0
ORDER: tuple[Kind, ...] = (
    "shares",
    "claims",
    "hints",
    "leases",
    "unit claims",
    "probes",
    "hand-offs",
    "snapshots",
    "payloads",
)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What may go, by kind in the order of removal, and what stays although nobody in the run needs it.

    ``unguarded`` may only go while no node lives; ``young`` are left for a later time, ``strangers`` for their owner.
    """

    found: Mapping[Kind, tuple[Entry, ...]]
    unguarded: frozenset[str]
    young: tuple[Entry, ...]
    strangers: tuple[Entry, ...]

    def figures(self) -> dict[str, dict[str, int]]:
        """Objects and bytes by kind, those of which there are any."""
        return {
            kind: {"objects": len(here), "bytes": sum(entry.size for entry in here)}
            for kind, here in self.found.items()
            if here
        }


@dataclass(frozen=True, slots=True)
class Place:
    """Everything of a run but its tape. ``survey`` is None where no manifest was found."""

    survey: Survey | None
    objects: tuple[Entry, ...]
    now: float
    named: tuple[frozenset[str] | None, ...] = ()

    @property
    def nodes(self) -> Mapping[str, Presence]:
        """Every node with a lease."""
        return self.survey.presences if self.survey is not None else presences(self.objects, self.now, ())


async def looked_at(host: Host, now: float) -> Place:
    """Read what there is to be judged. Raises :class:`RunMismatch` if the prefix holds something else."""
    prefixes = (LIVE, BLOBS, CREATION, UNITS, PROBES, DOCTOR, HANDOFFS)
    objects = [entry for each in await asyncio.gather(*(listing(host.mailbox, p) for p in prefixes)) for entry in each]
    survey = await surveyed(host, now)  # after the listing: what it names was written before
    if survey is None:
        return Place(None, tuple(objects), now)
    everything = {entry.key: entry for entry in (*survey.objects, *objects)}
    run, fragments = survey.found.manifest.run, survey.fragments
    found = await asyncio.gather(
        *(named_since(host.mailbox, run, chain.fragment, fragments, chain.version) for chain in survey.chains)
    )
    named = tuple(None if keys is None else frozenset(keys) for keys in found)
    return Place(survey, tuple(everything.values()), survey.now, named)


def judged(place: Place, min_age: float, lease_timeout: float, handoff_age: float = HANDOFF_AGE) -> Leftovers:
    """What may go of a place, and what not yet."""
    kept = _newest_handoffs(place)
    quiet = not any(presence.lives(lease_timeout) for presence in place.nodes.values())
    needless, unguarded = _needless(place, lease_timeout)
    found: defaultdict[Kind, list[Entry]] = defaultdict(list)
    young: list[Entry] = []
    for kind, entry in needless:
        if entry.key in unguarded and not quiet:
            continue
        patience = max(min_age, handoff_age) if entry.key in kept else min_age
        if entry.modified is None or place.now - entry.modified < patience:
            young.append(entry)
        else:
            found[kind].append(entry)
    for entries in found.values():
        entries.sort(key=lambda entry: entry.key)
    strangers = tuple(entry for entry in place.objects if not _is_ours(entry.key))
    ordered = {kind: tuple(found[kind]) for kind in ORDER}
    return Leftovers(ordered, frozenset(unguarded), tuple(young), strangers)


async def removed(
    host: Host, leftovers: Leftovers, lease_timeout: float, now: Callable[[], float], tell: Callable[[int], None]
) -> dict[str, dict[str, int]]:
    """Remove what was found; objects and bytes by kind of what went. ``tell`` hears how many are gone.

    What may only go while no node lives goes first, and only if a fresh listing shows none.
    """
    first = [e for here in leftovers.found.values() for e in here if e.key in leftovers.unguarded]
    seen = presences(await listing(host.mailbox, LEASES), now(), ()) if first else {}
    if any(presence.lives(lease_timeout) for presence in seen.values()):
        first = []
    rest = [e for here in leftovers.found.values() for e in here if e.key not in leftovers.unguarded]
    gone: set[str] = set()
    for batch in (*_batches(first), *_batches(rest)):
        await asyncio.gather(*(host.mailbox.delete(entry.key) for entry in batch))
        gone.update(entry.key for entry in batch)
        tell(len(gone))
    went = {kind: tuple(e for e in here if e.key in gone) for kind, here in leftovers.found.items()}
    return Leftovers(went, frozenset(), (), ()).figures()


def _batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Deleted side by side; the record of a mean or of a hand-off is never beside a payload."""
    records = [entry for entry in entries if _goes_first(entry.key)]
    others = [entry for entry in entries if not _goes_first(entry.key)]
    for here in (records, others):
        for start in range(0, len(here), DELETED_AT_ONCE):
            yield here[start : start + DELETED_AT_ONCE]


def _goes_first(key: str) -> bool:
    handoff = parse_handoff(key)
    return isinstance(parse_gossip(key), MeanKey) or (handoff is not None and handoff.is_record)


def _is_ours(key: str) -> bool:
    if key.startswith(BLOBS):
        return is_blob_key(key)
    if key.startswith(GOSSIP):
        return parse_gossip(key) is not None
    if key.startswith(LIVE):
        return parse_live(key) is not None
    if key.startswith(HANDOFFS):
        return parse_handoff(key) is not None
    return not key.startswith(UNITS) or parse_unit(key) is not None


def _needless(place: Place, lease_timeout: float) -> tuple[list[Judgement], set[str]]:
    """What nobody needs, whatever its age, and which of it only while no node lives."""
    needless: list[Judgement] = [*_beats(place, lease_timeout), *_unit_claims(place), *_handoffs(place, lease_timeout)]
    needless += [("probes", entry) for entry in place.objects if entry.key.startswith((PROBES, DOCTOR))]
    needless += [("claims", entry) for entry in place.objects if entry.key.startswith(CREATION)]
    unguarded: set[str] = set()
    if place.survey is None:
        needless += [("payloads", entry) for entry in place.objects if is_blob_key(entry.key)]
        unguarded = {entry.key for _, entry in needless}
    elif place.survey.mixing is not None:
        needless += _gossip(place, place.survey)
    else:
        needless += _hints(place, place.survey)
        for judgement in _rounds(place, place.survey):
            needless.append(judgement)
            if not _is_closed(place.survey, judgement[1].key):
                unguarded.add(judgement[1].key)
    if _joins(place, lease_timeout):
        needless = [(kind, entry) for kind, entry in needless if kind != "payloads"]
    return needless, unguarded


def _joins(place: Place, lease_timeout: float) -> bool:
    """Whether a node may be loading what was a head when it came; one that has beaten for too long has hung."""
    return any(
        presence.lease.state == "j" and (presence.age is None or presence.age < JOINING_LEASES * lease_timeout)
        for presence in place.nodes.values()
    )


def _is_closed(survey: Survey, key: str) -> bool:
    round = _round_of(key)
    return round is not None and round < (survey.chains[round % survey.fragments].version + 1) * survey.fragments


def _round_of(key: str) -> int | None:
    """The round that a payload, snapshot or claim is of."""
    live = parse_live(key)
    return live.round if isinstance(live, DeltaKey | ClaimKey) else blob_round(key) if is_blob_key(key) else None


def _rounds(place: Place, survey: Survey) -> Iterator[Judgement]:
    """Snapshots of closed rounds, claims, and payloads that no record names."""
    initial = {section.key for section in survey.found.manifest.theta}
    for entry in place.objects:
        key = parse_live(entry.key)
        if isinstance(key, DeltaKey) and _is_closed(survey, entry.key):
            yield "snapshots", entry
        elif isinstance(key, ClaimKey):
            yield "claims", entry
        elif is_blob_key(entry.key) and entry.key not in initial:
            round = _round_of(entry.key)
            named = None if round is None else place.named[round % survey.fragments]
            if named is not None and entry.key not in named:
                yield "payloads", entry


def _hints(place: Place, survey: Survey) -> Iterator[Judgement]:
    """Hints that a newer one of the same fragment, at a round that is closed, makes useless."""
    hints = {key: entry for entry in place.objects if isinstance(key := parse_live(entry.key), HeadKey)}
    newest: dict[int, int] = {}
    for key in hints:
        if key.round // survey.fragments <= survey.chains[key.round % survey.fragments].version:
            newest[key.fragment] = max(key.round, newest.get(key.fragment, 0))
    yield from (("hints", entry) for key, entry in hints.items() if key.round < newest.get(key.fragment, 0))


def _beats(place: Place, lease_timeout: float) -> Iterator[Judgement]:
    """All beats of who left or was silent for ten lease time-outs; of the others all but the newest two."""
    beats: defaultdict[str, list[tuple[LeaseKey, Entry]]] = defaultdict(list)
    for entry in place.objects:
        if isinstance(key := parse_live(entry.key), LeaseKey):
            beats[key.node].append((key, entry))
    for node, here in beats.items():
        here.sort(key=lambda beat: beat[0].beat)
        gone = not place.nodes[node].lives(JOINING_LEASES * lease_timeout)
        yield from (("leases", entry) for _, entry in (here if gone else here[:-BEATS_KEPT]))


def _handoffs(place: Place, lease_timeout: float) -> Iterator[Judgement]:
    """Hand-offs of nodes that do not live, the newest too: its age decides."""
    for entry in place.objects:
        key = parse_handoff(entry.key)
        if key is not None and not (key.node in place.nodes and place.nodes[key.node].lives(lease_timeout)):
            yield "hand-offs", entry


def _newest_handoffs(place: Place) -> set[str]:
    """Every object of each node's newest hand-off that has its record."""
    keys = [(entry.key, key) for entry in place.objects if (key := parse_handoff(entry.key)) is not None]
    newest: dict[str, str] = {}
    for _, key in keys:
        if key.is_record:
            newest[key.node] = max(key.folder, newest.get(key.node, ""))
    return {path for path, key in keys if newest.get(key.node) == key.folder}


def _unit_claims(place: Place) -> Iterator[Judgement]:
    """Claims and releases of blocks that are finished."""
    units = [(key, entry) for entry in place.objects if (key := parse_unit(entry.key)) is not None]
    done = {(key.queue, key.block) for key, _ in units if key.word == "done"}
    yield from (("unit claims", entry) for key, entry in units if _is_spent(key, done))


def _is_spent(key: UnitKey, done: set[tuple[str, int]]) -> bool:
    return key.word != "done" and (key.queue, key.block) in done


def _gossip(place: Place, survey: Survey) -> Iterator[Judgement]:
    """What nodes would sweep, judged by the newest roster that can be read."""
    keys = {key: entry for entry in place.objects if (key := parse_gossip(entry.key)) is not None}
    listed, mixing = Listed(tuple(keys)), survey.mixing
    initial = {section.key for section in survey.found.manifest.theta}
    payloads = [entry for entry in place.objects if is_blob_key(entry.key) and entry.key not in initial]
    yield from (("payloads", entry) for entry in payloads if (blob_round(entry.key) or 0) < survey.fragments)
    if mixing is None or mixing.roster is None:
        return
    round, fragments = mixing.roster.round, survey.fragments
    yield from (("shares", keys[key]) for key in outlived(listed, round, fragments))
    oldest = _oldest_kept(kept_means(listed, fragments), round, fragments)
    for entry in payloads:
        if fragments <= (blob_round(entry.key) or 0) < oldest:
            yield "payloads", entry


def _oldest_kept(kept: Iterable[GossipKey], round: int, fragments: int) -> int:
    """Payloads below this number are older than every mean that is kept; 0 while fewer are listed than are kept."""
    rounds = [key.round for key in kept]
    if len(rounds) < MEANS_KEPT * fragments:
        return 0
    return payload_number(min(min(rounds), round - ROUNDS_KEPT + 1), 0, fragments)
