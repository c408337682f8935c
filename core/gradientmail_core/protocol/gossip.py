"""Keys and records of gossip rounds.

``live/gossip/{t:010d}/roster``                                create-once: members, seed, averagers of round t
``live/gossip/{t:010d}/start-{stage}-{fragment:03d}-{node}``   parameters a node starts the round with
``live/gossip/{t:010d}/grad-{stage}-{fragment:03d}-{node}``    its outer gradient
``live/gossip/{t:010d}/mix2-{fragment:03d}-{node}``            an averager's mean of the gradients
``live/gossip/{t:010d}/mix1-{fragment:03d}``                   create-once: the mean of the starts, as a change
``live/gossip/{t:010d}/mean-{fragment:03d}``                   create-once: the same mean in full, a little later
``live/gossip/{t:010d}/probe-{node}``                          outputs of a node's start on a small fixed batch

A *share* (start, gradient, mean gradient, probe) is one object: its record in the metadata of a safetensors payload.
A node writes each of its shares once, and a roster names members with their incarnation, so a key never holds two
contents that matter. The mean of the starts is what joiners and exports take and what the next starts are published
against, so it must be one thing for all: its payloads lie under ``blobs/``, named by content, and the records that
name them are created once. Nodes need it soon and hold the mean before, so the change to that comes first; joiners
need it in full. Nothing in a gossip round decides more than who mixes with whom: garbage under any of
these keys costs one round's mixing, and never stops a node.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, assert_never, cast, get_args

from gradientmail_core.protocol.fields import (
    HEX,
    SHA256,
    FieldRefused,
    Fields,
    Rejected,
    canonical_json,
    guarded,
    parse_object,
)
from gradientmail_core.protocol.keys import ROUND_MAX, is_blob_key, is_node
from gradientmail_core.protocol.records import FORMAT, PARTICIPANTS_MOST, RECORD_LONGEST

GOSSIP = "live/gossip/"
METADATA = "gradientmail"
STAGES_MOST = 9

Kind: TypeAlias = Literal["start", "grad", "mix2", "probe"]

_NODE = r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?"
_ROSTER = re.compile(r"live/gossip/(\d{10})/roster\Z", re.ASCII)
_MEAN = re.compile(r"live/gossip/(\d{10})/(mix1|mean)-(\d{3})\Z", re.ASCII)
_STAGED = re.compile(rf"live/gossip/(\d{{10}})/(start|grad)-(\d)-(\d{{3}})-({_NODE})\Z", re.ASCII)
_MIXED = re.compile(rf"live/gossip/(\d{{10}})/mix2-(\d{{3}})-({_NODE})\Z", re.ASCII)
_PROBE = re.compile(rf"live/gossip/(\d{{10}})/probe-({_NODE})\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class RosterKey:
    """The roster of a round."""

    round: int

    @property
    def path(self) -> str:
        """The object's key."""
        return f"{gossip_prefix(self.round)}roster"


@dataclass(frozen=True, slots=True)
class MeanKey:
    """The mean of a fragment's starts in a round, in full or as a change."""

    round: int
    fragment: int
    full: bool = False

    @property
    def path(self) -> str:
        """The object's key."""
        return f"{gossip_prefix(self.round)}{'mean' if self.full else 'mix1'}-{self.fragment:03d}"


@dataclass(frozen=True, slots=True)
class ShareKey:
    """What one node gives the others in a round; ``stage`` counts the mixes of a round from 0."""

    round: int
    kind: Kind
    fragment: int
    node: str
    stage: int = 0

    @property
    def path(self) -> str:
        """The object's key."""
        return gossip_prefix(self.round) + self._name

    @property
    def _name(self) -> str:
        match self.kind:
            case "start" | "grad":
                return f"{self.kind}-{self.stage}-{self.fragment:03d}-{self.node}"
            case "mix2":
                return f"mix2-{self.fragment:03d}-{self.node}"
            case "probe":
                return f"probe-{self.node}"
            case _:
                assert_never(self.kind)


GossipKey: TypeAlias = RosterKey | MeanKey | ShareKey


def gossip_prefix(round: int) -> str:
    """Where the objects of a round lie."""
    return f"{GOSSIP}{round:010d}/"


def parse_gossip(key: str) -> GossipKey | None:
    """The meaning of a key under ``live/gossip/``, or None for a stranger's."""
    if match := _STAGED.match(key):
        return ShareKey(int(match[1]), cast(Kind, match[2]), int(match[4]), match[5], int(match[3]))
    if match := _MEAN.match(key):
        return MeanKey(int(match[1]), int(match[3]), match[2] == "mean")
    if match := _MIXED.match(key):
        return ShareKey(int(match[1]), "mix2", int(match[2]), match[3])
    if match := _PROBE.match(key):
        return ShareKey(int(match[1]), "probe", 0, match[2])
    if match := _ROSTER.match(key):
        return RosterKey(int(match[1]))
    return None


@dataclass(frozen=True, slots=True)
class Member:
    """A node that a roster counts on; ``silent`` ones are let in, and nobody waits for them."""

    node: str
    incarnation: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class RosterRecord:
    """Who takes part in a round, drawn up by the first node that starts it.

    ``averagers`` has a node for each fragment; ``mean`` says that starts are averaged over all in this round.
    ``l2`` and ``js`` are the newest probes the creator knew, ``strong`` that Mix2 is strengthened for this round.
    """

    run: str
    round: int
    node: str
    nonce: str
    seed: str
    members: tuple[Member, ...]
    averagers: tuple[str, ...]
    mean: bool
    strong: bool
    l2: float | None
    js: float | None
    format: int = FORMAT

    def encoded(self) -> bytes:
        """Canonical bytes."""
        return canonical_json(asdict(self))

    @property
    def active(self) -> tuple[str, ...]:
        """Members that are waited for, in name order."""
        return tuple(sorted(member.node for member in self.members if not member.silent))


@dataclass(frozen=True, slots=True)
class Blob:
    """A payload under ``blobs/``; ``sha256`` is of its data bytes."""

    key: str
    sha256: str
    codec: str


@dataclass(frozen=True, slots=True)
class MeanRecord:
    """The mean of a fragment's starts: in full where ``base`` is None, else as a change to the mean of that name.

    ``name`` is the sha256 of the mean's data in full, whichever the payload is; both give the same values.
    ``spread`` is the mean over the participants of the squared distance from the mean, ``tokens`` what everybody
    trained on up to these starts, as far as the averagers knew.
    """

    run: str
    round: int
    fragment: int
    node: str
    nonce: str
    participants: tuple[str, ...]
    name: str
    payload: Blob
    base: str | None
    spread: float
    tokens: int
    format: int = FORMAT

    def encoded(self) -> bytes:
        """Canonical bytes."""
        return canonical_json(asdict(self))


@dataclass(frozen=True, slots=True)
class ShareRecord:
    """What a share's payload carries in its metadata.

    ``base`` names the mean that the values are a difference to, empty where they stand alone, and ``base_round`` the
    round it was made in (0 also for the initial parameters). ``data`` is the sha256 of the payload's data. ``steps``
    and ``tokens`` are the training that a start or gradient stands for: the node's since its last start.
    """

    run: str
    round: int
    kind: Kind
    fragment: int
    node: str
    incarnation: str
    base: str
    base_round: int
    data: str
    codec: str
    steps: int
    tokens: int
    format: int = FORMAT

    def encoded(self) -> str:
        """Canonical text."""
        return canonical_json(asdict(self)).decode()


def _fields(body: bytes | str, run: str) -> Fields:
    fields = parse_object(body, RECORD_LONGEST)
    if fields.count("format") != FORMAT:
        raise FieldRefused("of another format")
    if fields.text("run", HEX) != run:
        raise FieldRefused("of another run")
    return fields


def _node(fields: Fields, name: str = "node") -> str:
    return _checked_node(fields.text(name, longest=64))


def _checked_node(item: object) -> str:
    if not isinstance(item, str) or not is_node(item):
        raise FieldRefused("a node id cannot be one")
    return item


def _member(fields: Fields) -> Member:
    return Member(_node(fields), fields.text("incarnation", HEX), fields.flag("silent"))


def parse_roster(body: bytes, run: str, round: int, fragments: int) -> RosterRecord | Rejected:
    """The roster of ``round`` in ``body``."""

    def parse() -> RosterRecord:
        fields = _fields(body, run)
        members = tuple(_member(item) for item in fields.objects("members", PARTICIPANTS_MOST))
        averagers = tuple(_checked_node(item) for item in fields.items("averagers", fragments))
        if fields.count("round", ROUND_MAX) != round or len(averagers) != fragments:
            raise FieldRefused("of another round, or with other fragments")
        if len({member.node for member in members}) != len(members):
            raise FieldRefused("a member occurs twice")
        return RosterRecord(
            run=run,
            round=round,
            node=_node(fields),
            nonce=fields.text("nonce", HEX),
            seed=fields.text("seed", HEX),
            members=members,
            averagers=averagers,
            mean=fields.flag("mean"),
            strong=fields.flag("strong"),
            l2=fields.optional_number("l2"),
            js=fields.optional_number("js"),
        )

    return guarded(parse)


def _blob(fields: Fields) -> Blob:
    key = fields.text("key")
    if not is_blob_key(key):
        raise FieldRefused("a payload's key is no payload's")
    return Blob(key, fields.text("sha256", SHA256), fields.text("codec", longest=64))


def parse_mean(body: bytes, run: str, key: MeanKey) -> MeanRecord | Rejected:
    """The mean at ``key``, in the form the key says."""

    def parse() -> MeanRecord:
        fields = _fields(body, run)
        if (fields.count("round", ROUND_MAX), fields.count("fragment", 999)) != (key.round, key.fragment):
            raise FieldRefused("of another round or fragment")
        name, base = fields.text("name", SHA256), fields.optional_text("base", SHA256)
        payload = _blob(fields.object("payload"))
        if key.full != (base is None) or (key.full and payload.sha256 != name):
            raise FieldRefused("not in the form its key says")
        return MeanRecord(
            run=run,
            round=key.round,
            fragment=key.fragment,
            node=_node(fields),
            nonce=fields.text("nonce", HEX),
            participants=tuple(_checked_node(item) for item in fields.items("participants", PARTICIPANTS_MOST)),
            name=name,
            payload=payload,
            base=base,
            spread=max(fields.number("spread"), 0.0),
            tokens=fields.count("tokens"),
        )

    return guarded(parse)


def parse_share(
    metadata: Mapping[str, str], run: str, key: ShareKey, incarnation: str | None
) -> ShareRecord | Rejected:
    """The record in a share's metadata, if it is the share of that key (and that incarnation of its node)."""

    def parse() -> ShareRecord:
        fields = _fields(metadata.get(METADATA, ""), run)
        record = ShareRecord(
            run=run,
            round=fields.count("round", ROUND_MAX),
            kind=_kind(fields),
            fragment=fields.count("fragment", 999),
            node=_node(fields),
            incarnation=fields.text("incarnation", HEX),
            base=fields.text("base", re.compile(r"([0-9a-f]{64})?\Z")),
            base_round=fields.count("base_round", ROUND_MAX),
            data=fields.text("data", SHA256),
            codec=fields.text("codec", longest=64),
            steps=fields.count("steps", 2**31),
            tokens=fields.count("tokens"),
        )
        if (record.round, record.kind, record.fragment, record.node) != (key.round, key.kind, key.fragment, key.node):
            raise FieldRefused("of another key")
        if incarnation is not None and record.incarnation != incarnation:
            raise FieldRefused("of another process of that name")
        return record

    return guarded(parse)


def _kind(fields: Fields) -> Kind:
    kind = fields.text("kind")
    if kind not in get_args(Kind):
        raise FieldRefused(f"no share is called {kind[:20]!r}")
    return cast(Kind, kind)
