"""Codes of a few bits for groups of values that share a scale: the frame of the F8, F4 and INT codecs.

A :class:`Coder` knows how one group is coded; :class:`GroupedCodec` cuts a fragment into groups. The
layout of an encoded fragment of ``n`` elements in groups of ``g``:

* ``scales``: what the coder keeps for a group, group after group; ``⌈n/g⌉`` groups, the last one short.
* ``values``: the codes of all elements in order, ``b`` bits each, the earlier element in the lower bits
  of a byte; ``⌈n·b/8⌉`` bytes, unused bits zero. Nothing is padded to a whole group.

A group that holds an infinity or a NaN gets a scale that is not finite and decodes as not finite
throughout, so a learner's fault is seen by whoever merges it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors.kernels import for_blocks, scratch
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.parts import ELEMENT_BYTES, Bytes, PartSpec

Rows: TypeAlias = NDArray[np.float32]
"""Contiguous fp32 of shape (groups, width)."""

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)


class Coder(Protocol):
    """How values that share a scale become codes of ``bits`` bits; groups may have any width.

    ``scale_dtype`` and ``scales_per_group`` say what is kept for a group, ``code_dtype`` as what the
    codes are shown in a payload. ``packed`` holds the codes of all groups back to back.
    """

    @property
    def bits(self) -> int:
        """Bits of a code; 8 divides by it or it by 8."""
        ...

    @property
    def code_dtype(self) -> str:
        """safetensors dtype of the codes."""
        ...

    @property
    def scale_dtype(self) -> str:
        """safetensors dtype of a scale."""
        ...

    @property
    def scales_per_group(self) -> int:
        """Scales of one group."""
        ...

    def encode(self, rows: Rows, scales: Bytes, packed: Bytes) -> None:
        """Code each row of at most BLOCK elements in all."""
        ...

    def decode(self, packed: Bytes, scales: Bytes, rows: Rows) -> None:
        """Write the values of at most BLOCK codes into ``rows``."""
        ...


@dataclass(frozen=True, slots=True)
class GroupedCodec:
    """A coder applied to groups of ``group`` consecutive elements; ``group`` divides BLOCK."""

    name: str
    coder: Coder
    group: int
    lossless: bool = False
    elementwise: bool = False

    def parts(self, size: int) -> tuple[PartSpec, ...]:
        """``scales`` and ``values``."""
        return coded_parts(self.coder, -(-size // self.group), size)

    def encode(self, values: Flat, out: Sequence[Bytes]) -> None:
        """Code each group with its own scale."""

        def block(start: int, stop: int) -> None:
            for span in self._spans(start, stop):
                self.coder.encode(values[span.elements].reshape(span.shape), out[0][span.scales], out[1][span.codes])

        for_blocks(values.size, block)

    def decode(self, parts: Sequence[Bytes], start: int, stop: int, out: Flat) -> None:
        """Restore elements ``start`` to ``stop``, groups cut short at ``stop`` included."""

        def block(first: int, last: int) -> None:
            for span in self._spans(start + first, start + last):
                inside = slice(span.elements.start - start, span.elements.stop - start)
                self.coder.decode(parts[1][span.codes], parts[0][span.scales], out[inside].reshape(span.shape))

        for_blocks(stop - start, block)

    def _spans(self, start: int, stop: int) -> Iterator["Span"]:
        full = start + (stop - start) // self.group * self.group
        if full > start:
            yield self._span(start, full, self.group)
        if stop > full:
            yield self._span(full, stop, stop - full)

    def _span(self, start: int, stop: int, width: int) -> "Span":
        groups, first = (stop - start) // width, start // self.group
        per_group = self.coder.scales_per_group * ELEMENT_BYTES[self.coder.scale_dtype]
        return Span(
            slice(start, stop),
            (groups, width),
            slice(first * per_group, (first + groups) * per_group),
            slice(start * self.coder.bits // 8, -(-stop * self.coder.bits // 8)),
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Groups of one width: their elements, as which shape, and the bytes of their scales and codes."""

    elements: slice
    shape: tuple[int, int]
    scales: slice
    codes: slice


def coded_parts(coder: Coder, groups: int, size: int) -> tuple[PartSpec, PartSpec]:
    """The parts of ``size`` values coded in ``groups`` groups."""
    width = ELEMENT_BYTES[coder.code_dtype]
    return (
        PartSpec("scales", coder.scale_dtype, groups * coder.scales_per_group),
        PartSpec("values", coder.code_dtype, -(-size * coder.bits // (8 * width))),
    )


def largest_magnitudes(rows: Rows) -> NDArray[np.uint32]:
    """The bits of each row's largest absolute value; NaN counts as largest of all."""
    magnitudes = scratch("scaled", rows.size, np.uint32).reshape(rows.shape)
    np.bitwise_and(rows.view(np.uint32), MAGNITUDE, out=magnitudes)
    largest: NDArray[np.uint32] = np.maximum.reduce(magnitudes, axis=1)
    return largest


def codes_for(rows: Rows) -> Bytes:
    """Scratch for one code a byte; as long as ``rows``, in a buffer with room for :func:`pack`'s padding."""
    return scratch("codes", rows.size + 4, np.uint8)[: rows.size]


def pack(codes: Bytes, bits: int, packed: Bytes) -> None:
    """Close up codes from :func:`codes_for`, one a byte, to ``bits`` bits each: 4 or 2."""
    padded = scratch("codes", codes.size + 4, np.uint8)
    padded[codes.size :] = 0
    if bits == 4:
        pairs = padded[: packed.size * 2].view(np.uint16)
        joined = scratch("packed", pairs.size, np.uint16)
        np.bitwise_or(pairs, np.right_shift(pairs, 4, out=joined), out=joined)
        np.copyto(packed, joined, casting="unsafe")
    else:
        fours = padded[: packed.size * 4].view(np.uint32)
        twos = scratch("packed twos", fours.size, np.uint32)
        joined_fours = scratch("packed fours", fours.size, np.uint32)
        np.bitwise_or(fours, np.right_shift(fours, 6, out=twos), out=twos)
        np.bitwise_or(twos, np.right_shift(twos, 12, out=joined_fours), out=joined_fours)
        np.copyto(packed, joined_fours, casting="unsafe")


def look_up(table: NDArray[np.float32], packed: Bytes, out: Flat) -> None:
    """Write the values of packed codes into ``out``; row ``b`` of ``table`` has all values of byte ``b``."""
    places = scratch("places", packed.size, np.intp)
    np.copyto(places, packed)
    per_byte = table.shape[1]
    whole = out.size // per_byte
    np.take(table, places[:whole], axis=0, out=out[: whole * per_byte].reshape(whole, per_byte), mode="clip")
    if whole < packed.size:
        out[whole * per_byte :] = table[packed[whole], : out.size - whole * per_byte]


def table_of(levels: Sequence[float], bits: int) -> NDArray[np.float32]:
    """For each byte, the values of its ``8 // bits`` codes; ``levels`` has the value of each code."""
    byte = np.arange(256)[:, None]
    codes = (byte >> np.arange(0, 8, bits)) & (2**bits - 1)
    table: NDArray[np.float32] = np.asarray(levels, np.float32)[codes]
    return table
