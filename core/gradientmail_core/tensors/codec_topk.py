"""TopK: the largest values of every 4096 elements, and where they are.

A fragment is cut into chunks of 4096 elements. Of each chunk exactly ``kept`` values are sent, those of
largest magnitude, the earlier one where two are equal; of a last chunk of ``r`` elements ``⌈kept·r/4096⌉``.
The rest decodes as zero, so ``‖x − x̂‖² <= (1 − kept/4096)·‖x‖²`` plus the error of the values' own codec.
Meant to be used with error feedback (SparseLoCo, arXiv 2508.15706).

Parts, for ``n`` values kept in all:

* ``indices``: 12 bits each, ascending within a chunk, two in three bytes, low bits first; ``⌈1.5·n⌉`` bytes.
* ``scales`` and ``values``: the kept values in that order in any other codec, one group to a chunk.

``kept`` is a multiple of four, so every chunk's indices and codes start at a byte. With 64 of 4096 and
two-bit values that is 0.219 bits per element, and 0.008 for the levels.

The selection is exact: numpy's vectorised partition finds a chunk's ``kept``-th largest magnitude
faster than a threshold could be sampled and then trimmed to the fixed count.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codec_groups import MAGNITUDE, Coder, Rows, coded_parts
from gradientmail_core.tensors.kernels import for_blocks, scratch
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.parts import ELEMENT_BYTES, Bytes, Codec, PartSpec

CHUNK = 4096
FORM = re.compile(r"TOPK\(\s*(?:(\d{1,4})/4096|(\d(?:\.\d{0,12})?|\.\d{1,12}))\s*,\s*([A-Z0-9_]{1,16})\s*\)")


@dataclass(frozen=True, slots=True)
class Plain:
    """The coder that keeps values in an elementwise codec, without a scale."""

    codec: Codec
    scale_dtype: str = "U8"
    scales_per_group: int = 0

    @property
    def code_dtype(self) -> str:
        """The codec's own dtype."""
        return self.codec.parts(1)[0].dtype

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 8 * ELEMENT_BYTES[self.code_dtype]

    def encode(self, rows: Rows, scales: Bytes, packed: Bytes) -> None:
        """Element by element."""
        self.codec.encode(rows.reshape(-1), [packed])

    def decode(self, packed: Bytes, scales: Bytes, rows: Rows) -> None:
        """Element by element."""
        self.codec.decode([packed], 0, rows.size, rows.reshape(-1))


@dataclass(frozen=True, slots=True)
class TopK:
    """The ``kept`` largest of every 4096 values, coded by ``coder``, whose codec is called ``values``.

    Raises :class:`ConfigurationError` unless ``kept`` is a multiple of 4 from 4 to 4096.
    """

    kept: int
    values: str
    coder: Coder
    lossless: bool = False
    elementwise: bool = False

    def __post_init__(self) -> None:
        if not 4 <= self.kept <= CHUNK or self.kept % 4:
            raise ConfigurationError(
                f"TopK cannot keep {self.kept} of {CHUNK} values.", f"Use a multiple of 4 from 4 to {CHUNK}."
            )

    @property
    def name(self) -> str:
        """Canonical text form, such as ``TOPK(64/4096,INT2)``."""
        return f"TOPK({self.kept}/{CHUNK},{self.values})"

    def parts(self, size: int) -> tuple[PartSpec, ...]:
        """``indices``, ``scales``, ``values``."""
        total = size // CHUNK * self.kept + self._kept_of(size % CHUNK)
        return (PartSpec("indices", "U8", _index_bytes(total)), *coded_parts(self.coder, -(-size // CHUNK), total))

    def encode(self, values: Flat, out: Sequence[Bytes]) -> None:
        """Select, then code places and values."""

        def block(start: int, stop: int) -> None:
            full = start + (stop - start) // CHUNK * CHUNK
            if full > start:
                self._encode_chunks(values[start:full].reshape(-1, CHUNK), start // CHUNK, self.kept, out)
            if stop > full:
                self._encode_chunks(values[full:stop].reshape(1, -1), full // CHUNK, self._kept_of(stop - full), out)

        for_blocks(values.size, block)

    def decode(self, parts: Sequence[Bytes], start: int, stop: int, out: Flat) -> None:
        """Zero, then put the kept values in place. An index past ``stop`` is dropped; of equal ones the last holds."""

        def block(first: int, last: int) -> None:
            self._decode_chunks(parts, (start + first) // CHUNK, out[first:last])

        for_blocks(stop - start, block)

    def _kept_of(self, elements: int) -> int:
        """Values kept of a chunk that is ``elements`` long."""
        return -(-self.kept * elements // CHUNK)

    def _encode_chunks(self, rows: Rows, chunk: int, kept: int, out: Sequence[Bytes]) -> None:
        places = largest_places(rows, kept)
        chosen = np.take(rows.reshape(-1), places).reshape(len(rows), kept)
        indices, scales, codes = self._slices(chunk, len(rows), chosen.size)
        pack_twelve(places % rows.shape[1], out[0][indices])
        self.coder.encode(chosen, out[1][scales], out[2][codes])

    def _decode_chunks(self, parts: Sequence[Bytes], chunk: int, out: Flat) -> None:
        available = len(parts[0]) * 2 // 3 - chunk * self.kept
        total = min(-(-out.size // CHUNK) * self.kept, available)
        full = total // self.kept
        out.fill(0)
        for first, rows, kept in ((0, full, self.kept), (full, 1, total - full * self.kept)):
            if rows * kept == 0:
                continue
            indices, scales, codes = self._slices(chunk + first, rows, rows * kept)
            values = scratch("kept", rows * kept, np.float32).reshape(rows, kept)
            self.coder.decode(parts[2][codes], parts[1][scales], values)
            places = unpack_twelve(parts[0][indices], rows * kept).reshape(rows, kept)
            places += ((first + np.arange(rows)) * CHUNK)[:, None]
            inside = places < out.size
            out[places[inside]] = values[inside]

    def _slices(self, chunk: int, chunks: int, kept: int) -> tuple[slice, slice, slice]:
        """Where the indices, scales and codes of ``kept`` values in ``chunks`` chunks from ``chunk`` on lie."""
        before = chunk * self.kept
        per_group = self.coder.scales_per_group * ELEMENT_BYTES[self.coder.scale_dtype]
        bits = self.coder.bits
        return (
            slice(_index_bytes(before), _index_bytes(before + kept)),
            slice(chunk * per_group, (chunk + chunks) * per_group),
            slice(before * bits // 8, -(-(before + kept) * bits // 8)),
        )


def largest_places(rows: Rows, kept: int) -> NDArray[np.intp]:
    """Flat places of the ``kept`` values of largest magnitude in each row, ascending; NaN counts as largest."""
    magnitudes = scratch("magnitudes", rows.size, np.uint32).reshape(rows.shape)
    ordered = scratch("ordered", rows.size, np.uint32).reshape(rows.shape)
    np.bitwise_and(rows.view(np.uint32), MAGNITUDE, out=magnitudes)
    np.copyto(ordered, magnitudes)
    least_place = rows.shape[1] - kept
    ordered.partition(least_place, axis=1)
    least = ordered[:, least_place, None]
    chosen = scratch("flags", rows.size, np.bool_).reshape(rows.shape)
    np.greater_equal(magnitudes, least, out=chosen)
    places = np.flatnonzero(chosen)
    if places.size == len(rows) * kept:
        return places
    tied = np.count_nonzero(chosen, axis=1) > kept
    chosen[tied] = _first_of_equals(magnitudes[tied], least[tied], kept)
    return np.flatnonzero(chosen)


def _first_of_equals(magnitudes: NDArray[np.uint32], least: NDArray[np.uint32], kept: int) -> NDArray[np.bool_]:
    """All above ``least``, and as many of those equal to it, from the left, as make up ``kept``."""
    above, equal = magnitudes > least, magnitudes == least
    wanted = kept - np.count_nonzero(above, axis=1)
    chosen: NDArray[np.bool_] = above | (equal & (np.cumsum(equal, axis=1) <= wanted[:, None]))
    return chosen


def _index_bytes(count: int) -> int:
    return -(-count * 3 // 2)


def pack_twelve(indices: NDArray[np.intp], out: Bytes) -> None:
    """Two indices below 4096 in three bytes: the first in the lower twelve bits; a last one alone in two."""
    pairs = np.zeros((-(-indices.size // 2), 2), np.uint32)
    pairs.reshape(-1)[: indices.size] = indices
    joined = pairs[:, 0] | pairs[:, 1] << 12
    three = np.empty((len(pairs), 3), np.uint8)
    for byte in range(3):
        three[:, byte] = joined >> (8 * byte) & 0xFF
    out[:] = three.reshape(-1)[: out.size]


def unpack_twelve(packed: Bytes, count: int) -> NDArray[np.intp]:
    """The ``count`` indices that :func:`pack_twelve` wrote."""
    three = np.zeros((-(-count // 2), 3), np.intp)
    three.reshape(-1)[: packed.size] = packed
    joined = three[:, 0] | three[:, 1] << 8 | three[:, 2] << 16
    return np.stack([joined & 0xFFF, joined >> 12], axis=1).reshape(-1)[:count]
