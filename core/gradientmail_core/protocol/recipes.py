"""Keys and records of the patterns: units of work, ranks, barriers. Only nodes that use a pattern list its prefix.

``units/{queue}/{block:08d}/claim-{n:04d}``     create-once: who works on a block; the highest number holds it
``units/{queue}/{block:08d}/release-{n:04d}``   create-once: claim ``n`` was given up, with so many units finished
``units/{queue}/{block:08d}/done``              create-once: the block is finished
``ranks/{rank:04d}/{term:06d}``                 create-once: who took a rank; the lowest term of a living node holds it
``barriers/{barrier}/node-{node}``              who arrived
``barriers/{barrier}/open``                     create-once: the barrier is open, for ever

Keys that fit no pattern are nobody's and are passed over.
"""

import re
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, cast

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.fields import HEX, Rejected, canonical_json, guarded, parse_object
from gradientmail_core.protocol.records import FORMAT, RECORD_LONGEST

UNITS_MOST = 10**8

UnitWord: TypeAlias = Literal["claim", "release", "done"]

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?\Z")
_UNIT = re.compile(r"units/([^/]+)/(\d{8})/(claim|release|done)(?:-(\d{4}))?\Z", re.ASCII)
_RANK = re.compile(r"ranks/(\d{4})/(\d{6})\Z", re.ASCII)
_ARRIVAL = re.compile(r"barriers/([^/]+)/node-([a-z0-9._-]{1,64})\Z")


def checked_name(name: str, what: str) -> str:
    """``name`` itself if it can be part of a key, else :class:`ConfigurationError`."""
    if not _NAME.match(name):
        raise ConfigurationError(
            f"The {what} name {name[:80]!r} cannot be used in keys.",
            "Use 1 to 64 lower-case letters, digits, '.', '_' or '-', starting and ending with a letter or digit.",
        )
    return name


@dataclass(frozen=True, slots=True)
class UnitKey:
    """A word on a block of a queue: the ``number``-th claim or its release, or that it is done (number 0)."""

    queue: str
    block: int
    word: UnitWord
    number: int = 0

    @property
    def path(self) -> str:
        """The object's key."""
        end = self.word if self.word == "done" else f"{self.word}-{self.number:04d}"
        return f"units/{self.queue}/{self.block:08d}/{end}"


def parse_unit(key: str) -> UnitKey | None:
    """The meaning of a key under ``units/``, or None for a stranger's."""
    match = _UNIT.match(key)
    if match is None or (match[3] == "done") != (match[4] is None):
        return None
    return UnitKey(match[1], int(match[2]), cast(UnitWord, match[3]), int(match[4] or 0))


@dataclass(frozen=True, slots=True)
class RankKey:
    """The ``term``-th taking of a rank."""

    rank: int
    term: int

    @property
    def path(self) -> str:
        """The object's key."""
        return f"ranks/{self.rank:04d}/{self.term:06d}"


def parse_rank(key: str) -> RankKey | None:
    """The meaning of a key under ``ranks/``, or None for a stranger's."""
    match = _RANK.match(key)
    return RankKey(int(match[1]), int(match[2])) if match else None


def arrival_key(barrier: str, node: str) -> str:
    """That a node arrived at a barrier."""
    return f"barriers/{barrier}/node-{node}"


def open_key(barrier: str) -> str:
    """That a barrier is open."""
    return f"barriers/{barrier}/open"


def arrived_node(key: str) -> str | None:
    """The node whose arrival a key under ``barriers/`` says, or None."""
    match = _ARRIVAL.match(key)
    return match[2] if match else None


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """How far a node came with a block: ``finished`` of its units, all of them in a ``done``."""

    run: str
    node: str
    incarnation: str
    finished: int
    format: int = FORMAT

    def encoded(self) -> bytes:
        """Canonical bytes."""
        return canonical_json(asdict(self))


def parse_unit_record(body: bytes, run: str) -> UnitRecord | Rejected:
    """The record in ``body``, of that run."""

    def parse() -> UnitRecord:
        fields = parse_object(body, RECORD_LONGEST)
        fields.count("format", FORMAT)
        return UnitRecord(
            run=fields.text("run", re.compile(re.escape(run) + r"\Z")),
            node=fields.text("node", longest=64),
            incarnation=fields.text("incarnation", HEX),
            finished=fields.count("finished", UNITS_MOST),
        )

    return guarded(parse)
