"""The records of a run: what they say, their canonical bytes, and their strict parsers.

A record is JSON in canonical form. Its identity is the sha256 of its bytes: a snapshot names the
record it was trained from, and a round record names its predecessor in the same chain, so a chain is
linked by content. Identity (run, node, incarnation, nonce) is in the body, because some stores drop
object metadata. Parsers give a value or :class:`Rejected`; the same bytes are judged alike by
everyone, from the bytes and the manifest alone.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from gradientmail_core.protocol.fields import (
    COUNT_MAX,
    HEX,
    SHA256,
    FieldRefused,
    Fields,
    Rejected,
    canonical_json,
    guarded,
    parse_object,
)
from gradientmail_core.protocol.keys import ROUND_MAX, is_blob_key
from gradientmail_core.tensors.schema import ROLES

FORMAT = 1
MANIFEST_LONGEST = 64 * 2**20
RECORD_LONGEST = 2**20
PARTICIPANTS_MOST = 4096
LISTED_MOST = 64
"""Participants, and refusals, that stand in a record itself; if there are more, all of them are in its roll."""

ROLL_LONGEST = 8 * 2**20
DIMENSIONS_MOST = 64
SECONDS_MOST = 1e6

SectionName: TypeAlias = Literal["theta", "change", "outer", "residual", "roll"]
StoreClass: TypeAlias = Literal["atomic", "racy", "none"]
Reason: TypeAlias = Literal[
    "zero_steps", "schema", "stale", "missing", "corrupt", "nonfinite", "outlier", "unsigned", "run"
]


def digest(body: bytes | bytearray | memoryview | str) -> str:
    """sha256 of ``body``, in hex."""
    return hashlib.sha256(body.encode() if isinstance(body, str) else body).hexdigest()


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a committed payload: ``sha256`` is of its uncompressed canonical data bytes.

    ``makes`` stands with a change only: the digest of the parameters that the version before becomes by it.
    """

    name: SectionName
    key: str
    sha256: str
    codec: str
    makes: str | None = None


@dataclass(frozen=True, slots=True)
class Participant:
    """A snapshot that was merged: whose, which, and with what share of the round (weights sum to 1)."""

    node: str
    incarnation: str
    snapshot: str
    steps: int
    tokens: int
    weight: float


@dataclass(frozen=True, slots=True)
class Share:
    """A node's part of the batch that the live nodes share, and its smoothed speed, samples per second (0: unknown)."""

    node: str
    samples: int
    speed: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A snapshot that was not merged, and why."""

    node: str
    incarnation: str
    snapshot: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Estimates:
    """Smoothed timings of the chain, in seconds of their closers' clocks, and its usual delta.

    ``step`` is one optimizer step, ``quorum`` from the first accepted snapshot to quorum, ``sync`` from
    the decision to the commit, ``grace`` the last grace, ``norm`` the delta's L2 norm per sqrt(steps).
    """

    step: float = 0.0
    quorum: float = 0.0
    sync: float = 0.0
    grace: float = 0.0
    norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the run is, fixed at its creation; also version 0 of every fragment.

    ``store`` is what the store's creates are worth; ``listed`` says that it remembers absence, so that nodes ask
    a listing before they read.
    """

    run: str
    node: str
    nonce: str
    schema: tuple[tuple[str, tuple[int, ...], str], ...]
    plan: tuple[tuple[tuple[str, int, int], ...], ...]
    algorithm: Mapping[str, object]
    store: StoreClass
    closers: tuple[str, ...]
    frozen: str | None
    theta: tuple[Section, ...]
    listed: bool = False
    format: int = FORMAT

    def encoded(self) -> bytes:
        """Canonical bytes."""
        return canonical_json(self)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The commit of a round.

    ``step`` is the due step the round stood for, ``next_step`` that of the fragment's next round,
    ``closer`` who closes it. ``newest_step`` is the run's clock: the newest step the closer had reached or
    seen. ``prev`` is the digest of the fragment's previous record. A round without participants is void: it
    names the sections of the version before, and the chain goes on. ``merged_tokens`` adds up the whole chain's.
    ``final`` says that only nodes took part that were leaving, and that the outer optimizer's state is as it was.
    ``skipped`` is the version before this one if its parameters could not be read: this one was built on an older.
    ``shares`` divide the batch among the live nodes; only rounds of fragment 0 name them, where speed decides.
    Of more than :data:`LISTED_MOST` participants or refusals only so many are listed: ``others`` counts the
    participants beyond, and the section ``roll`` names a payload with all of both.
    """

    run: str
    round: int
    node: str
    nonce: str
    prev: str
    step: int
    next_step: int
    newest_step: int
    closer: str
    sections: tuple[Section, ...]
    participants: tuple[Participant, ...]
    refusals: tuple[Refusal, ...]
    estimates: Estimates
    cosine: float | None
    merged_tokens: int
    final: bool = False
    shares: tuple[Share, ...] = ()
    others: int = 0
    skipped: int | None = None
    format: int = FORMAT

    def encoded(self) -> bytes:
        """Canonical bytes."""
        return canonical_json(self)

    @property
    def headcount(self) -> int:
        """Participants, those beyond the listed ones included."""
        return len(self.participants) + self.others

    @property
    def roll(self) -> Section | None:
        """Where all participants and refusals are, if not here."""
        return next((section for section in self.sections if section.name == "roll"), None)

    @property
    def void(self) -> bool:
        """True if nothing was merged."""
        return not self.participants


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """What a snapshot's payload carries in its metadata.

    ``base`` is the digest of the record it was trained from, ``data`` the sha256 of the payload's data,
    ``step_seconds`` the node's median step time, ``local_step`` its own step count and ``clock`` its round clock.
    ``early`` says that it was taken before its due step, because the round was about to close without it; ``final``
    that its node leaves. ``age`` is how many commits of the fragment its node has trained from before, since it joined.
    """

    run: str
    round: int
    node: str
    incarnation: str
    base: str
    data: str
    codec: str
    steps: int
    tokens: int
    local_step: int
    step_seconds: float
    early: bool = False
    final: bool = False
    age: int = 0
    clock: int = 0
    format: int = FORMAT

    def encoded(self) -> str:
        """Canonical text; its sha256 is the snapshot's digest in the round record."""
        return canonical_json(self).decode()


@dataclass(frozen=True, slots=True)
class Claim:
    """A node's word that it creates the run, or closes a round in another's place."""

    run: str
    node: str
    incarnation: str
    nonce: str
    format: int = FORMAT

    def encoded(self) -> bytes:
        """Canonical bytes."""
        return canonical_json(self)


def _same_format(fields: Fields) -> None:
    found = fields.count("format")
    if found != FORMAT:
        raise FieldRefused(f"format {found}, this library reads {FORMAT}")


def _same_run(fields: Fields, run: str) -> None:
    if fields.text("run", HEX) != run:
        raise FieldRefused("of another run")


def _section(fields: Fields) -> Section:
    name = fields.text("name")
    if name not in get_args(SectionName):
        raise FieldRefused(f"no section is called {name[:20]!r}")
    key = fields.text("key")
    if not is_blob_key(key):
        raise FieldRefused("a section's key is no payload's")
    makes = fields.optional_text("makes", SHA256)
    if (makes is not None) != (name == "change"):
        raise FieldRefused("a change does not say what it makes, or something else does")
    sha256, codec = fields.text("sha256", SHA256), fields.text("codec", longest=64)
    return Section(name, key, sha256, codec, makes)  # type: ignore[arg-type]  # the name was checked above


def _sections(fields: Fields, name: str, most: int) -> tuple[Section, ...]:
    return tuple(_section(section) for section in fields.objects(name, most))


def _participant(fields: Fields) -> Participant:
    weight = fields.number("weight")
    if not 0 <= weight <= 1:
        raise FieldRefused("a weight lies outside 0 to 1")
    return Participant(
        node=fields.text("node", longest=64),
        incarnation=fields.text("incarnation", HEX),
        snapshot=fields.text("snapshot", SHA256),
        steps=fields.count("steps"),
        tokens=fields.count("tokens"),
        weight=weight,
    )


def _share(fields: Fields) -> Share:
    samples, speed = fields.count("samples", 2**31), fields.number("speed")
    if samples < 1 or speed < 0:
        raise FieldRefused("a share of nothing, or a negative speed")
    return Share(fields.text("node", longest=64), samples, speed)


def _refusal(fields: Fields) -> Refusal:
    reason = fields.text("reason")
    if reason not in get_args(Reason):
        raise FieldRefused(f"no refusal is called {reason[:20]!r}")
    return Refusal(
        node=fields.text("node", longest=64),
        incarnation=fields.text("incarnation", longest=64),
        snapshot=fields.text("snapshot", longest=64),
        reason=reason,  # type: ignore[arg-type]  # checked against the known reasons above
    )


def _estimates(fields: Fields) -> Estimates:
    seconds = {name: _seconds(fields, name) for name in ("step", "quorum", "sync", "grace")}
    return Estimates(**seconds, norm=max(fields.number("norm"), 0.0))


def _seconds(fields: Fields, name: str) -> float:
    """A duration, bounded so that no sum or product of a few of them is infinite."""
    return min(max(fields.number(name), 0.0), SECONDS_MOST)


def _tensor(item: object) -> tuple[str, tuple[int, ...], str]:
    match item:
        case [str() as name, [*shape], str() as role] if len(name) <= 512 and role in ROLES:
            sizes = tuple(size for size in shape if type(size) is int and 0 <= size <= COUNT_MAX)
            if len(sizes) == len(shape) <= DIMENSIONS_MOST:
                return name, sizes, role
    raise FieldRefused("a tensor is not [name, shape, role]")


def _closer(item: object) -> str:
    if not isinstance(item, str) or len(item) > 64:
        raise FieldRefused("a closer is not a node id")
    return item


def _rows(item: object) -> tuple[str, int, int]:
    match item:
        case [str() as name, int() as first, int() as last] if -1 <= first <= last <= COUNT_MAX:
            return name, first, last
    raise FieldRefused("a piece is not [name, first row, last row]")


def _pieces(item: object) -> tuple[tuple[str, int, int], ...]:
    if not isinstance(item, list) or not item:
        raise FieldRefused("a fragment is not a list of pieces")
    return tuple(_rows(piece) for piece in item)


def parse_manifest(body: bytes) -> Manifest | Rejected:
    """The manifest in ``body``; its plan is checked against its schema by the layouts' builder."""

    def parse() -> Manifest:
        fields = parse_object(body, MANIFEST_LONGEST)
        _same_format(fields)
        store = fields.text("store")
        if store not in get_args(StoreClass):
            raise FieldRefused(f"no store class is called {store[:20]!r}")
        manifest = Manifest(
            run=fields.text("run", HEX),
            node=fields.text("node", longest=64),
            nonce=fields.text("nonce", HEX),
            schema=tuple(_tensor(item) for item in fields.items("schema", 10**6)),
            plan=tuple(_pieces(item) for item in fields.items("plan", 1000)),
            algorithm=fields.mapping("algorithm"),
            store=store,  # type: ignore[arg-type]  # checked against the known classes above
            closers=tuple(_closer(item) for item in fields.items("closers", 1000)),
            frozen=fields.optional_text("frozen", SHA256),
            theta=_sections(fields, "theta", 1000),
            listed=fields.flag("listed"),
        )
        if not len(manifest.plan) == len(manifest.closers) == len(manifest.theta) > 0:
            raise FieldRefused("fragments, closers and payloads differ in number")
        return manifest

    return guarded(parse)


def parse_round(body: bytes, run: str, round: int) -> RoundRecord | Rejected:
    """The record of ``round`` of ``run`` in ``body``; any other round or run is refused."""
    return _parsed_round(bytes(body), run, round)


@lru_cache(maxsize=32)  # nodes of one process, such as simulated ones, read the same bytes
def _parsed_round(body: bytes, run: str, round: int) -> RoundRecord | Rejected:
    def parse() -> RoundRecord:
        fields = parse_object(body, RECORD_LONGEST)
        _same_format(fields)
        _same_run(fields, run)
        record = RoundRecord(
            run=run,
            round=fields.count("round", ROUND_MAX),
            node=fields.text("node", longest=64),
            nonce=fields.text("nonce", HEX),
            prev=fields.text("prev", SHA256),
            step=fields.count("step"),
            next_step=fields.count("next_step"),
            newest_step=fields.count("newest_step"),
            closer=fields.text("closer", longest=64),
            sections=_sections(fields, "sections", 8),
            participants=tuple(_participant(item) for item in fields.objects("participants", PARTICIPANTS_MOST)),
            refusals=tuple(_refusal(item) for item in fields.objects("refusals", PARTICIPANTS_MOST)),
            estimates=_estimates(fields.object("estimates")),
            cosine=fields.optional_number("cosine"),
            merged_tokens=fields.count("merged_tokens"),
            final=fields.flag("final"),
            shares=tuple(_share(item) for item in fields.objects("shares", PARTICIPANTS_MOST)),
            others=fields.count("others", PARTICIPANTS_MOST),
            skipped=fields.optional_count("skipped"),
        )
        if record.round != round:
            raise FieldRefused(f"of round {record.round}")
        if record.next_step <= record.step:
            raise FieldRefused("the next step does not lie ahead")
        if not any(section.name in ("theta", "change") for section in record.sections):
            raise FieldRefused("no parameters are named")
        return record

    return guarded(parse)


def is_long(record: RoundRecord) -> bool:
    """Whether a record lists more than has room in it."""
    return max(len(record.participants), len(record.refusals)) > LISTED_MOST


def roll_of(record: RoundRecord) -> bytes:
    """All participants and refusals of a record, in its order, as its roll holds them."""
    return canonical_json({"participants": record.participants, "refusals": record.refusals})


def abridged(record: RoundRecord, roll: Section) -> RoundRecord:
    """A long record as it is committed, with its ``roll`` named."""
    return replace(
        record,
        participants=record.participants[:LISTED_MOST],
        refusals=record.refusals[:LISTED_MOST],
        others=max(len(record.participants) - LISTED_MOST, 0),
        sections=(*record.sections, roll),
    )


def completed(record: RoundRecord, body: bytes) -> RoundRecord | Rejected:
    """An abridged record with everything that ``body``, its roll, lists; it must be the roll that it names."""
    roll = _parsed_roll(bytes(body), record.roll.sha256 if record.roll is not None else "")
    if isinstance(roll, Rejected):
        return roll
    full = replace(record, participants=roll[0], refusals=roll[1], others=0)
    if full.headcount != record.headcount:
        return Rejected("it does not list as many participants as the record counts")
    return full


@lru_cache(maxsize=16)  # as above; a roll of a thousand nodes takes half a megabyte
def _parsed_roll(body: bytes, sha256: str) -> tuple[tuple[Participant, ...], tuple[Refusal, ...]] | Rejected:
    """The participants and refusals of a roll of this digest."""

    def parse() -> tuple[tuple[Participant, ...], tuple[Refusal, ...]]:
        if digest(body) != sha256:
            raise FieldRefused("its bytes are not those the record names")
        fields = parse_object(body, ROLL_LONGEST)
        return (
            tuple(_participant(item) for item in fields.objects("participants", PARTICIPANTS_MOST)),
            tuple(_refusal(item) for item in fields.objects("refusals", PARTICIPANTS_MOST)),
        )

    return guarded(parse)


def parse_snapshot(text: str, run: str) -> SnapshotRecord | Rejected:
    """The snapshot's record in a payload's metadata."""

    def parse() -> SnapshotRecord:
        fields = parse_object(text, RECORD_LONGEST)
        _same_format(fields)
        _same_run(fields, run)
        return SnapshotRecord(
            run=run,
            round=fields.count("round", ROUND_MAX),
            node=fields.text("node", longest=64),
            incarnation=fields.text("incarnation", HEX),
            base=fields.text("base", SHA256),
            data=fields.text("data", SHA256),
            codec=fields.text("codec", longest=64),
            steps=fields.count("steps", 2**31),
            tokens=fields.count("tokens"),
            local_step=fields.count("local_step"),
            step_seconds=_seconds(fields, "step_seconds"),
            early=fields.flag("early"),
            final=fields.flag("final"),
            age=fields.count("age"),
            clock=fields.count("clock"),
        )

    return guarded(parse)


def parse_claim(body: bytes, run: str | None) -> Claim | Rejected:
    """The claim in ``body``; with ``run`` given, only one of that run."""

    def parse() -> Claim:
        fields = parse_object(body, RECORD_LONGEST)
        _same_format(fields)
        if run is not None:
            _same_run(fields, run)
        return Claim(
            run=fields.text("run", HEX),
            node=fields.text("node", longest=64),
            incarnation=fields.text("incarnation", HEX),
            nonce=fields.text("nonce", HEX),
        )

    return guarded(parse)
