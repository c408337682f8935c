"""Creating, deciding and reading: the only code that turns mailbox answers into facts.

*Mine* means the bytes read back are the bytes sent. A create whose outcome is unknown is repeated with
the same bytes; when the store then says "taken", the object is read back and compared, so a lost answer
never looks like a lost race. Each attempt's bytes carry a fresh nonce, so another attempt (an older
process of this node included) is adopted like anybody's.

*A round is decided* by the first slot whose object is a well-formed record of this run and round. A slot
whose object, read twice, is anything else is spent for everyone alike, since only its bytes and the
manifest are judged; the next slot is used. So garbage under a deciding key can neither stop a chain nor
fork it. Payloads are written before the record that names them: a crash in between leaves an orphan,
never a record of something missing.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from gradientmail_core.clock import Clock
from gradientmail_core.errors import ConfigurationError, PayloadTooLarge, RunMismatch
from gradientmail_core.mailbox.base import Body, CreateOutcome, Mailbox
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import blob_key, roll_key, tape_key
from gradientmail_core.protocol.link import Compression, Link
from gradientmail_core.protocol.records import (
    RECORD_LONGEST,
    ROLL_LONGEST,
    RoundRecord,
    Section,
    SectionName,
    abridged,
    completed,
    digest,
    is_long,
    parse_round,
    roll_of,
)
from gradientmail_core.tensors.codecs import Codec, codec_named
from gradientmail_core.tensors.compression import opened
from gradientmail_core.tensors.kernels import for_blocks
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.payload import Malformed, encode_payload, parse_payload, payload_bytes_max
from gradientmail_core.tensors.schema import FragmentLayout

SLOTS_MOST = 1000
READ_BACK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Won:
    """The object at the key is the one this call sent."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Another object was there first; its bytes."""

    body: bytes


Outcome: TypeAlias = Won | Lost


@dataclass(frozen=True, slots=True)
class Decided:
    """The round's record, the digest of its bytes, and the slot it stands in: those before are spent."""

    record: RoundRecord
    digest: str
    slot: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Open:
    """No record was found; ``slot`` is the first that is not spent."""

    slot: int


async def bounded_get(mailbox: Mailbox, key: str, limit: int) -> bytes | None:
    """The object, None if it was not found, or empty bytes if it is longer than ``limit``."""
    try:
        return await mailbox.get(key, limit=limit)
    except PayloadTooLarge:
        return b""


async def create_once(mailbox: Mailbox, clock: Clock, key: str, body: bytes, limit: int = RECORD_LONGEST) -> Outcome:
    """Create ``key`` with ``body``; won only if these bytes are what the key holds."""
    while True:
        if await mailbox.create(key, body) is CreateOutcome.CREATED:
            return Won()
        found = await bounded_get(mailbox, key, max(limit, len(body)))
        if found is not None:
            return Won() if found == body else Lost(found)
        await clock.sleep(READ_BACK_SECONDS)


async def read_round(mailbox: Mailbox, run: str, round: int) -> Decided | Open:
    """The record of ``round``, or the slot in which it will appear."""
    for slot in range(SLOTS_MOST):
        key = tape_key(round, slot)
        body = await bounded_get(mailbox, key, RECORD_LONGEST)
        if body is None:
            return Open(slot)
        record = parse_round(body, run, round)
        if isinstance(record, Rejected):
            body = await bounded_get(mailbox, key, RECORD_LONGEST) or b""
            record = parse_round(body, run, round)
        if isinstance(record, RoundRecord):
            return Decided(record, digest(body), slot)
    raise RunMismatch(
        f"{SLOTS_MOST} slots of round {round} at {mailbox.url} hold no record of this run.",
        "Something else writes under this prefix; give the run a prefix of its own.",
    )


async def commit_round(mailbox: Mailbox, clock: Clock, record: RoundRecord) -> Decided:
    """Try to commit ``record``; the decided record of its round, which may be another's.

    The payloads the record names must already be in the mailbox. Raises ValueError for a record that readers would
    refuse: its writer alone would take the slot for decided, and the chain would fork.
    """
    body = record.encoded()
    if isinstance(problem := parse_round(body, record.run, record.round), Rejected):
        raise ValueError(f"A round record that nobody would accept: {problem.reason}.")
    slot = 0
    while True:
        if isinstance(await create_once(mailbox, clock, tape_key(record.round, slot), body), Won):
            return Decided(record, digest(body), slot)
        state = await read_round(mailbox, record.run, record.round)
        if isinstance(state, Decided):
            return state
        slot = state.slot


async def written(mailbox: Mailbox, record: RoundRecord) -> RoundRecord:
    """``record`` as it may be committed: one that lists too many writes its roll and names it."""
    if not is_long(record):
        return record
    body = roll_of(record)
    sha256 = digest(body)
    key = roll_key(record.round, record.node, content_digest("roll", sha256))
    await mailbox.put(key, body)
    return abridged(record, Section("roll", key, sha256, "JSON"))


async def read_roll(mailbox: Mailbox, record: RoundRecord) -> RoundRecord | Rejected:
    """The record with all its participants and refusals, from its roll if it has one."""
    if record.roll is None:
        return record
    body = await bounded_get(mailbox, record.roll.key, ROLL_LONGEST)
    return Rejected("missing") if body is None else completed(record, body)


async def put_section(
    mailbox: Mailbox,
    clock: Clock,
    name: SectionName,
    round: int,
    node: str,
    layout: FragmentLayout,
    values: Flat,
    *,
    codec: str = "F32",
    makes: str | None = None,
    link: Link | None = None,
    compression: Compression | None = None,
) -> Section:
    """Encode ``values``, write the payload, and return what a record says of it.

    ``makes`` is the digest of the parameters that a change makes; ``compression`` needs a ``link``.
    """
    link, wire = link or Link(), codec_named(codec)

    def encoded() -> tuple[Body, bool, str]:
        body, data = encode_section(name, layout, wire, values)
        packed = link.packed(body, wire, compression)
        return packed, packed is not body, data

    body, compressed, data = await clock.compute(encoded)
    key = blob_key(round, node, content_digest(name, data), compressed=compressed)
    await link.put(mailbox, clock, key, body)
    return Section(name, key, data, wire.name, makes)


def content_digest(name: SectionName, data: str) -> str:
    """What names a payload in its key: the digest of its data for parameters, for others mixed with their name.

    Two sections of one round may hold the same numbers, such as zeros, under other names.
    """
    return data if name == "theta" else digest(f"{name}/{data}")


def encode_section(name: str, layout: FragmentLayout, codec: Codec, values: Flat) -> tuple[Body, str]:
    """A payload and the sha256 of its data."""
    digests: list[str] = []

    def describe(data: str) -> dict[str, str]:
        digests.append(data)
        return {"section": name}

    body = encode_payload(layout, codec, values, describe)
    return body, digests[-1]


async def get_section(mailbox: Mailbox, clock: Clock, section: Section, layout: FragmentLayout) -> Flat | Rejected:
    """The section's values as fp32, checked against the digest in its record."""
    try:
        codec = codec_named(section.codec)
    except ConfigurationError:
        return Rejected(f"the codec {section.codec[:40]!r} is not known")
    body = await bounded_get(mailbox, section.key, payload_bytes_max(layout, codec))
    if body is None:
        return Rejected("missing")
    return await clock.compute(lambda: _decoded(body, section, layout, codec))


def _decoded(body: bytes, section: Section, layout: FragmentLayout, codec: Codec) -> Flat | Rejected:
    plain = opened(body, payload_bytes_max(layout, codec))
    payload = plain if isinstance(plain, Malformed) else parse_payload(plain, layout, codec)
    if isinstance(payload, Malformed):
        return Rejected(payload.reason)
    if payload.sha256 != section.sha256:
        return Rejected("its bytes are not those the record names")
    if codec.name == "F32":
        return payload.parts[0].view("<f4")
    values = np.empty(layout.size, np.float32)
    for_blocks(values.size, lambda start, stop: codec.decode(payload.parts, start, stop, values[start:stop]))
    return values


async def newest_round(mailbox: Mailbox, run: str, fragment: int, fragments: int, version: int) -> Decided | None:
    """The newest commit of a fragment after ``version``, or None if there is none.

    Strides double while commits are found and halve when not, so a chain of n versions costs O(log n) requests.
    A missing answer in between only ends the search early: the caller goes on from what was found.
    """
    found: Decided | None = None
    stride, growing = 1, True
    while stride:
        state = await read_round(mailbox, run, (version + stride) * fragments + fragment)
        if isinstance(state, Decided):
            found, version = state, version + stride
        else:
            growing = False
        stride = stride * 2 if growing else stride // 2
    return found
