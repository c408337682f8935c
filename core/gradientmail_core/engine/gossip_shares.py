"""Shares and means on their way through the mailbox: encode, publish, read, check.

A start travels as its difference to a mean that sender and reader both hold, which is one outer step and some noise,
so few bits describe it; the reader adds the mean again, so rounding never adds up over rounds. Everybody uses the
decoded values, the sender of a share included: all who mix the same shares get the same bytes, and a mean over pairs
leaves the mean over all where it was.

What is read is checked against the layout before anything is taken from it, and refused as a whole (a value, never
an exception) if it is another round's, another process's, malformed, or not finite.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from gradientmail_core.algorithms.gossip import FactoredGossip, Selection, selected, selection, with_state
from gradientmail_core.algorithms.mixing import Decode
from gradientmail_core.engine.run import Host
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox.base import Body
from gradientmail_core.protocol.exchange import bounded_get, content_digest, encode_section
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.gossip import (
    METADATA,
    Blob,
    MeanKey,
    MeanRecord,
    ShareKey,
    ShareRecord,
    parse_mean,
    parse_share,
)
from gradientmail_core.protocol.keys import blob_key
from gradientmail_core.protocol.plan import manifest_schema
from gradientmail_core.protocol.records import RECORD_LONGEST, Manifest
from gradientmail_core.tensors import kernels
from gradientmail_core.tensors.buffers import wire_codec
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.payload import Malformed, encode_payload, parse_payload, payload_bytes_max, read_metadata
from gradientmail_core.tensors.schema import FragmentLayout

MEANS_KEPT = 3


@dataclass(frozen=True, slots=True)
class GossipRun:
    """A run as agreed. ``wires`` are the layouts of starts: the fragments, with their outer state where it is mixed.

    ``subsets`` are the parts of the fragments that Mix2 takes, ``wholes`` all of them.
    """

    manifest: Manifest
    layouts: tuple[FragmentLayout, ...]
    settings: FactoredGossip
    wires: tuple[FragmentLayout, ...]
    subsets: tuple[Selection | None, ...]
    wholes: tuple[Selection | None, ...]

    @classmethod
    def of(cls, manifest: Manifest, layouts: tuple[FragmentLayout, ...], settings: FactoredGossip) -> "GossipRun":
        """The run of a manifest. Raises :class:`ConfigurationError` if ``mix2_on`` fits no tensor of it."""
        schema = manifest_schema(manifest)
        states = settings.outer.state_names() if settings.average_momentum else ()
        chosen, every = selected(schema, settings.mix2_on), selected(schema, ())
        return cls(
            manifest,
            layouts,
            settings,
            tuple(with_state(layout, states) for layout in layouts),
            tuple(selection(layout, chosen) for layout in layouts),
            tuple(selection(layout, every) for layout in layouts),
        )

    @property
    def id(self) -> str:
        """128 random bits that tell runs apart."""
        return self.manifest.run

    @property
    def elements(self) -> int:
        """Parameters of the model."""
        return sum(layout.size for layout in self.layouts)


@dataclass(frozen=True, slots=True, eq=False)
class MeanValues:
    """A mean over all nodes: its fragment and round, its name (sha256 of its data in full), its values.

    ``tokens`` is what all nodes trained on until then.
    """

    fragment: int
    round: int
    name: str
    values: Flat
    tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """A share as everyone sees it: whose, its values, decoded piece by piece, and the tokens it stands for."""

    node: str
    decode: Decode
    tokens: int


class Means:
    """The newest means that this node holds; what starts are published against and decoded with."""

    def __init__(self) -> None:
        self._held: dict[int, list[MeanValues]] = {}

    def keep(self, mean: MeanValues) -> None:
        """Remember a mean; the oldest of a fragment is forgotten."""
        held = [other for other in self._held.get(mean.fragment, []) if other.round != mean.round]
        self._held[mean.fragment] = sorted([*held, mean], key=lambda one: one.round)[-MEANS_KEPT:]

    def newest(self, fragment: int) -> MeanValues | None:
        """The fragment's newest mean here."""
        held = self._held.get(fragment)
        return held[-1] if held else None

    def named(self, fragment: int, name: str) -> MeanValues | None:
        """The mean of that name, if it is here."""
        return next((mean for mean in self._held.get(fragment, []) if mean.name == name), None)


def encoded_share(
    host: Host,
    run: GossipRun,
    key: ShareKey,
    layout: FragmentLayout,
    values: Flat,
    base: MeanValues | None,
    counts: tuple[int, int],
) -> bytearray:
    """A share's object: ``values`` (fp32, ``layout.size``), as a difference to ``base`` where there is one.

    ``counts`` are the steps and tokens it stands for.
    """
    codec = wire_codec(layout, _codec_name(run.settings, key, base is not None))
    if base is not None:
        difference = np.empty(layout.size, np.float32)
        kernels.subtract(values, base.values, difference)
        values = difference

    def describe(data: str) -> dict[str, str]:
        record = ShareRecord(
            run=run.id,
            round=key.round,
            kind=key.kind,
            fragment=key.fragment,
            node=key.node,
            incarnation=host.incarnation,
            base="" if base is None else base.name,
            base_round=0 if base is None else max(base.round, 0),
            data=data,
            codec=codec.name,
            steps=counts[0],
            tokens=counts[1],
        )
        return {METADATA: record.encoded()}

    return encode_payload(layout, codec, values, describe)


def _codec_name(settings: FactoredGossip, key: ShareKey, based: bool) -> str:
    match key.kind:
        case "start":
            return settings.delta_codec if based else "F32"
        case "grad":
            return settings.delta_codec
        case "mix2":
            return settings.mean_codec
        case "probe":
            return "F32"


async def read_share(
    host: Host, run: GossipRun, means: Means, key: ShareKey, layout: FragmentLayout, incarnation: str | None
) -> Vector | Rejected | None:
    """The share at ``key``; None if it is not there (yet)."""
    codecs = ("F32", _codec_name(run.settings, key, True))
    limit = max(payload_bytes_max(layout, wire_codec(layout, codec)) for codec in codecs)
    body = await bounded_get(host.mailbox, key.path, limit + 2**16)
    if body is None:
        return None
    vector = await host.clock.compute(lambda: opened_share(run, means, key, layout, incarnation, body))
    if not isinstance(vector, str):
        return vector
    base = await _fetched_base(host, run, key, vector)
    if base is None:
        return Rejected("it is a difference to a mean that cannot be read")
    means.keep(base)
    again = await host.clock.compute(lambda: opened_share(run, means, key, layout, incarnation, body))
    return Rejected("it is a difference to another mean") if isinstance(again, str) else again


def opened_share(
    run: GossipRun,
    means: Means,
    key: ShareKey,
    layout: FragmentLayout,
    incarnation: str | None,
    body: bytes | bytearray,
) -> Vector | Rejected | str:
    """The share in ``body``; the name of its base if that is not among ``means``."""
    metadata = read_metadata(body)
    if isinstance(metadata, Malformed):
        return Rejected(metadata.reason)
    record = parse_share(metadata, run.id, key, incarnation)
    if isinstance(record, Rejected):
        return record
    if record.codec != codec_named(_codec_name(run.settings, key, bool(record.base))).name:
        return Rejected(f"of another codec, {record.codec[:40]!r}")
    if record.base and (key.kind != "start" or means.named(key.fragment, record.base) is None):
        return record.base if key.kind == "start" else Rejected("a difference where none is used")
    codec = wire_codec(layout, record.codec)
    payload = parse_payload(body, layout, codec)
    if isinstance(payload, Malformed):
        return Rejected(payload.reason)
    if payload.sha256 != record.data:
        return Rejected("its bytes are not those its record names")
    plain = partial(codec.decode, payload.parts)
    base = means.named(key.fragment, record.base) if record.base else None
    decode: Decode = plain if base is None else _added(plain, base.values)
    return Vector(key.node, decode, record.tokens) if _is_finite(decode, layout.size) else Rejected("not finite")


def _added(decode: Decode, base: Flat) -> Decode:
    def based(start: int, stop: int, out: Flat) -> None:
        decode(start, stop, out)
        np.add(out, base[start:stop], out=out)

    return based


def _is_finite(decode: Decode, size: int) -> bool:
    bad: list[int] = []

    def block(start: int, stop: int) -> None:
        values = kernels.scratch("share", stop - start, np.float32)
        decode(start, stop, values)
        if not kernels.is_finite(values):
            bad.append(start)

    kernels.for_blocks(size, block)
    return not bad


async def _fetched_base(host: Host, run: GossipRun, key: ShareKey, name: str) -> MeanValues | None:
    """The mean called ``name``, looked for in the rounds from which a start may take it."""
    for round in range(key.round, max(key.round - 3, -1), -1):
        record = await read_mean(host, run, MeanKey(round, key.fragment, full=True))
        if isinstance(record, MeanRecord) and record.name == name:
            mean = await mean_values(host, run, Means(), record)
            return None if isinstance(mean, Rejected) else mean
    return None


# -- means -------------------------------------------------------------------------------------------------


def initial_mean(run: GossipRun, fragment: int, theta: Flat) -> MeanValues:
    """What everybody starts the run from, as the mean of a round before the first; its outer state is zero."""
    values = np.zeros(run.wires[fragment].size, np.float32)
    values[: theta.size] = theta
    return MeanValues(fragment, -1, run.manifest.theta[fragment].sha256, values)


async def read_mean(host: Host, run: GossipRun, key: MeanKey) -> MeanRecord | Rejected | None:
    """The record of a mean; None if there is none (yet)."""
    body = await bounded_get(host.mailbox, key.path, RECORD_LONGEST)
    return None if body is None else parse_mean(body, run.id, key)


async def mean_values(host: Host, run: GossipRun, means: Means, record: MeanRecord) -> MeanValues | Rejected:
    """The values a record names; a change gives none where its base is not among ``means``."""
    base = None if record.base is None else means.named(record.fragment, record.base)
    if record.base is not None and base is None:
        return Rejected("a change to a mean that is not here")
    values = await read_blob(host, record.payload, run.wires[record.fragment])
    if isinstance(values, Rejected):
        return values
    if base is not None:
        kernels.add(base.values, values, values)
    return MeanValues(record.fragment, record.round, record.name, values, record.tokens)


async def read_blob(host: Host, blob: Blob, layout: FragmentLayout) -> Flat | Rejected:
    """A payload's values (fp32, writable), checked against the digest in its record, and finite."""
    try:
        codec = wire_codec(layout, blob.codec)
    except ConfigurationError:
        return Rejected(f"the codec {blob.codec[:40]!r} is not known")
    body = await bounded_get(host.mailbox, blob.key, payload_bytes_max(layout, codec))
    if body is None:
        return Rejected("missing")

    def decoded() -> Flat | Rejected:
        payload = parse_payload(body, layout, codec)
        if isinstance(payload, Malformed):
            return Rejected(payload.reason)
        if payload.sha256 != blob.sha256:
            return Rejected("its bytes are not those the record names")
        values = np.empty(layout.size, np.float32)
        kernels.for_blocks(layout.size, lambda i, j: codec.decode(payload.parts, i, j, values[i:j]))
        return values if kernels.is_finite(values) else Rejected("not finite")

    return await host.clock.compute(decoded)


def payload_number(round: int, fragment: int, fragments: int) -> int:
    """The number under ``blobs/`` of a mean's payloads; those below ``fragments`` are of the initial parameters.

    One for each round and fragment, since the values of two fragments may be the same bytes.
    """
    return (round + 1) * fragments + fragment


@dataclass(frozen=True, slots=True, eq=False)
class EncodedMean:
    """A mean ready to be put: its values as all will see them, and each payload with its object."""

    mean: MeanValues
    change: Blob
    change_body: Body
    full: Blob
    full_body: Body


def encoded_mean(
    host: Host, run: GossipRun, round: int, fragment: int, mean: Flat, base: MeanValues, tokens: int
) -> EncodedMean:
    """The mean as a change to ``base`` and in full. Both say the same: ``mean`` becomes base plus decoded change."""
    wire, number = run.wires[fragment], payload_number(round, fragment, len(run.layouts))
    narrow = wire_codec(wire, run.settings.mean_codec)
    difference = np.empty(wire.size, np.float32)
    kernels.subtract(mean, base.values, difference)
    change_body, change = encode_section("change", wire, narrow, difference)
    payload = parse_payload(change_body, wire, narrow)
    assert not isinstance(payload, Malformed), payload
    kernels.for_blocks(wire.size, lambda i, j: narrow.decode(payload.parts, i, j, difference[i:j]))
    kernels.add(base.values, difference, mean)
    full, full_body = encoded_full(host, run, MeanValues(fragment, round, "", mean))
    return EncodedMean(
        MeanValues(fragment, round, full.sha256, mean, tokens),
        Blob(blob_key(number, host.node, content_digest("change", change)), change, narrow.name),
        change_body,
        full,
        full_body,
    )


def encoded_full(host: Host, run: GossipRun, mean: MeanValues) -> tuple[Blob, Body]:
    """A mean in full, by any node that holds it."""
    codec, number = codec_named("F32"), payload_number(mean.round, mean.fragment, len(run.layouts))
    body, data = encode_section("theta", run.wires[mean.fragment], codec, mean.values)
    return Blob(blob_key(number, host.node, data), data, codec.name), body
