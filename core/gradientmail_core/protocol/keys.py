"""Every key of a run, built and parsed in one place.

``manifest.json``                                        create-once: what the run is
``creation/{n}``                                         claims to create the run
``tape/{round // 10000:06d}/{round:010d}-{slot}``        the commit of a round, create-once, never deleted
``live/heads/{fragment:03d}/{round:010d}``               hint: a recent commit of the fragment
``live/leases/{node}/{beat:010d}-{state}{step}-{tag}``   who lives, in which state, how far
``live/claims/{round:010d}/{n:03d}``                     takeovers of a round
``live/deltas/{round:010d}/{node}``                      a snapshot: record and payload in one object
``live/wanted/{round:010d}``                             a payload of a commit that a node could not read
``blobs/{round:010d}/{node}-{sha256}.safetensors``       a committed payload, named by its content
``blobs/{round:010d}/{node}-{sha256}.json``              a roll: participants too many for a record
``syncer/{term:06d}``                                    create-once: who was elected to close for all

Round ``r = version * P + p`` is the one that makes ``version`` of fragment ``p``; version 0 is the
manifest, so the initial parameters of fragment ``p`` lie under ``blobs/{p:010d}/``. Numbers are fixed
width, so keys sort as numbers do. A listed key that fits no pattern parses to None and is ignored:
strangers' objects cost themselves only.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, cast

from gradientmail_core.errors import ConfigurationError

MANIFEST = "manifest.json"
LIVE = "live/"
LEASES = "live/leases/"
BLOBS = "blobs/"
SYNCERS = "syncer/"
ROUNDS_PER_DIRECTORY = 10_000
ROUND_MAX = 10**10

LeaseState: TypeAlias = Literal["j", "t", "w", "e", "l", "v", "p", "s", "d", "x"]
"""What a node does: join, train, wait, be paused (``l v p``: the same of one that closes no rounds), only close, leave,
be gone."""

_NODE = r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?"
_NODE_ID = re.compile(_NODE + r"\Z")
_PAYLOAD = re.compile(rf"blobs/\d{{10}}/{_NODE}-[0-9a-f]{{64}}\.(safetensors(\.zst)?|json)\Z", re.ASCII)
_LEASE = re.compile(rf"live/leases/({_NODE})/(\d{{10}})-([jtwelvpsdx])(0|[1-9]\d{{0,14}})-([0-9a-f]{{16}})\Z", re.ASCII)
_HEAD = re.compile(r"live/heads/(\d{3})/(\d{10})\Z", re.ASCII)
_WANTED = re.compile(r"live/wanted/(\d{10})\Z", re.ASCII)
_CLAIM = re.compile(r"live/claims/(\d{10})/(\d{3})\Z", re.ASCII)
_BLOB = re.compile(r"blobs/(\d{10})/")
_TERM = re.compile(r"syncer/(\d{6})\Z", re.ASCII)
_DELTA = re.compile(rf"live/deltas/(\d{{10}})/({_NODE})\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """One beat of a node: all that others need to know of it, readable from a listing."""

    node: str
    beat: int
    state: LeaseState
    step: int
    tag: str

    @property
    def path(self) -> str:
        """The object's key."""
        return f"{LEASES}{self.node}/{self.beat:010d}-{self.state}{self.step}-{self.tag}"


@dataclass(frozen=True, slots=True)
class HeadKey:
    """A hint that ``round`` of ``fragment`` is committed."""

    fragment: int
    round: int

    @property
    def path(self) -> str:
        """The object's key."""
        return f"live/heads/{self.fragment:03d}/{self.round:010d}"


@dataclass(frozen=True, slots=True)
class ClaimKey:
    """The ``number``-th claim to take over ``round``."""

    round: int
    number: int

    @property
    def path(self) -> str:
        """The object's key."""
        return f"live/claims/{self.round:010d}/{self.number:03d}"


@dataclass(frozen=True, slots=True)
class DeltaKey:
    """A node's snapshot for a round."""

    round: int
    node: str

    @property
    def path(self) -> str:
        """The object's key."""
        return f"live/deltas/{self.round:010d}/{self.node}"


@dataclass(frozen=True, slots=True)
class WantedKey:
    """A payload that ``round`` committed is wanted: somebody could not read it."""

    round: int

    @property
    def path(self) -> str:
        """The object's key."""
        return f"live/wanted/{self.round:010d}"


LiveKey: TypeAlias = LeaseKey | HeadKey | ClaimKey | DeltaKey | WantedKey


@lru_cache(maxsize=1 << 14)  # most keys of a listing stood in the one before
def parse_live(key: str) -> LiveKey | None:
    """The meaning of a key under ``live/``, or None for a stranger's."""
    if match := _LEASE.match(key):
        node, beat, state, step, tag = match.groups()
        return LeaseKey(node, int(beat), cast(LeaseState, state), int(step), tag)
    if match := _HEAD.match(key):
        return HeadKey(int(match[1]), int(match[2]))
    if match := _CLAIM.match(key):
        return ClaimKey(int(match[1]), int(match[2]))
    if match := _WANTED.match(key):
        return WantedKey(int(match[1]))
    if match := _DELTA.match(key):
        return DeltaKey(int(match[1]), match[2])
    return None


def delta_prefix(round: int) -> str:
    """Where the snapshots of a round lie."""
    return f"live/deltas/{round:010d}/"


def creation_key(number: int) -> str:
    """The ``number``-th claim to create the run."""
    return f"creation/{number}"


def term_key(term: int) -> str:
    """Who was elected syncer for the ``term``-th time, from 0."""
    return f"{SYNCERS}{term:06d}"


def parse_term(key: str) -> int | None:
    """The term a key under ``syncer/`` names, or None for a stranger's."""
    match = _TERM.match(key)
    return int(match[1]) if match else None


def tape_key(round: int, slot: int) -> str:
    """The round's commit record in ``slot``; slots above 0 exist only past spent ones."""
    return f"tape/{round // ROUNDS_PER_DIRECTORY:06d}/{round:010d}-{slot}"


def blob_prefix(round: int) -> str:
    """Where the committed payloads of a round lie."""
    return f"{BLOBS}{round:010d}/"


def blob_round(key: str) -> int | None:
    """The round a payload's key names, or None for a stranger's."""
    match = _BLOB.match(key)
    return int(match[1]) if match else None


def blob_key(round: int, node: str, sha256: str, *, compressed: bool = False) -> str:
    """A committed payload, named by round, writer and the sha256 of its canonical bytes."""
    return f"{blob_prefix(round)}{node}-{sha256}.safetensors{'.zst' if compressed else ''}"


def roll_key(round: int, node: str, sha256: str) -> str:
    """The list of a round's participants and refusals, where it is too long for the record."""
    return f"{blob_prefix(round)}{node}-{sha256}.json"


def is_blob_key(key: str) -> bool:
    """True if :func:`blob_key` or :func:`roll_key` could have made ``key``."""
    return _PAYLOAD.match(key) is not None


def is_node(node: str) -> bool:
    """True if ``node`` can be part of a key."""
    return _NODE_ID.match(node) is not None


def checked_node(node: str) -> str:
    """``node`` itself if it can be part of a key, else :class:`ConfigurationError`."""
    if not is_node(node):
        raise ConfigurationError(
            f"The node id {node[:80]!r} cannot be used in keys.",
            "Use 1 to 64 lower-case letters, digits, '.', '_' or '-', starting and ending with a letter or digit.",
        )
    return node
