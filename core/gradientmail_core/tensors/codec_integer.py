"""INT8, INT4 and INT2: whole-number codes under one or two scales for each group of 256.

``INT8`` and ``INT4`` are uniform and symmetric: ``q = round(x / s)``, ``|q| <= Q`` with Q 127 and 7. The
scale is a bfloat16 rounded up, which has the range of fp32 where a half-precision scale would lose small
deltas; ``s <= amax/Q·(1 + 2^-7)``, and the error is at most ``s/2`` (fp32 rounding of ``x/s`` aside).

``INT2`` has four levels, ``±low`` and ``±high``, chosen for each group by Lloyd's rule: each level is the mean
of the magnitudes nearest to it. For normal values the error is 0.342 of the norm.
Because levels are means, ``‖x − x̂‖² <= ‖x‖²`` for any group, up to their rounding to bfloat16: what error
feedback needs to converge.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors.codec_float import round_to_bf16, widen_bf16
from gradientmail_core.tensors.codec_groups import (
    INFINITE,
    MAGNITUDE,
    GroupedCodec,
    Rows,
    codes_for,
    largest_magnitudes,
    look_up,
    pack,
    table_of,
)
from gradientmail_core.tensors.kernels import scratch
from gradientmail_core.tensors.parts import Bytes

SMALLEST_NORMAL = np.float32(2.0**-126)
LARGEST = float(np.finfo(np.float32).max)
ROUNDING = np.float32(1.5 * 2**23)
"""Added to a float below 2^22, it leaves the nearest whole number in the low bits, ties to even."""

BF16_NAN = 0x7FC0
LLOYD_PASSES = 3


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from ``-largest`` to ``largest`` in two's complement of ``bits`` bits (8 or 4)."""

    bits: int
    largest: int
    code_dtype: str
    scale_dtype: str = "BF16"
    scales_per_group: int = 1

    def encode(self, rows: Rows, scales: Bytes, packed: Bytes) -> None:
        """Scale each row by its largest magnitude, round, pack."""
        inverse = self._scales(largest_magnitudes(rows), scales.view(np.uint16))
        scaled = scratch("scaled", rows.size, np.float32).reshape(rows.shape)
        with np.errstate(invalid="ignore", under="ignore"):
            np.multiply(rows, inverse[:, None], out=scaled)
            np.add(scaled, ROUNDING, out=scaled)
        whole = scaled.reshape(-1).view(np.uint32)
        if self.bits == 8:
            np.copyto(packed, whole, casting="unsafe")
        else:
            codes = codes_for(rows)
            np.copyto(codes, np.bitwise_and(whole, 0xF, out=whole), casting="unsafe")
            pack(codes, self.bits, packed)

    def decode(self, packed: Bytes, scales: Bytes, rows: Rows) -> None:
        """Whole numbers times their scale."""
        if self.bits == 8:
            np.copyto(rows.reshape(-1), packed.view(np.int8))
        else:
            look_up(INT4_VALUES, packed, rows.reshape(-1))
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            np.multiply(rows, _widened(scales)[:, None], out=rows)

    def _scales(self, largest: NDArray[np.uint32], patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
        """Write each row's scale, rounded up to bfloat16; gives the inverses.

        The one scale that is rounded down, for the largest floats, is so by less than 1/500: no quotient
        passes ``largest + 1/2``, and none needs clipping.
        """
        finite = largest < INFINITE
        with np.errstate(under="ignore", invalid="ignore"):
            exact = largest.view(np.float32) / np.float32(self.largest)
        most = np.float32(LARGEST / self.largest).view(np.uint32) >> 16
        rounded = np.minimum((np.maximum(exact, SMALLEST_NORMAL).view(np.uint32) + 0xFFFF) >> 16, most)
        np.copyto(patterns, np.where(finite, rounded, BF16_NAN), casting="unsafe")
        inverse: NDArray[np.float32] = 1 / (rounded << 16).view(np.float32)
        return inverse


@dataclass(frozen=True, slots=True)
class FourLevels:
    """Codes 0 to 3 for ``low``, ``high``, ``-low``, ``-high``; a group keeps ``low`` and ``high`` as bfloat16."""

    bits: int = 2
    code_dtype: str = "U8"
    scale_dtype: str = "BF16"
    scales_per_group: int = 2

    def encode(self, rows: Rows, scales: Bytes, packed: Bytes) -> None:
        """Find each row's levels, then code by the nearer one and the sign; values not finite make the levels so."""
        unit = _powers_of_two(largest_magnitudes(rows))
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            magnitudes = scratch("scaled", rows.size, np.float32).reshape(rows.shape)
            np.multiply(rows, 1 / unit[:, None], out=magnitudes)
            np.bitwise_and(magnitudes.view(np.uint32), MAGNITUDE, out=magnitudes.view(np.uint32))
            levels = _lloyd(magnitudes)
            high_half = np.greater(magnitudes, levels.mean(axis=1, keepdims=True), out=_flags(rows))
            scaled = levels * unit[:, None]
        round_to_bf16(scaled.reshape(-1), scales.view(np.uint16))
        codes = codes_for(rows)
        signs = np.right_shift(rows.reshape(-1).view(np.uint32), 31, out=scratch("signs", rows.size, np.uint32))
        np.copyto(codes, np.left_shift(signs, 1, out=signs), casting="unsafe")
        np.bitwise_or(codes, high_half.reshape(-1).view(np.uint8), out=codes)
        pack(codes, 2, packed)

    def decode(self, packed: Bytes, scales: Bytes, rows: Rows) -> None:
        """One of the two terms of ``sign·(low or high)`` is zero, so their sum is exact."""
        levels = _widened(scales).reshape(-1, 2)
        high = scratch("high", rows.size, np.float32).reshape(rows.shape)
        look_up(LOW_SIGNS, packed, rows.reshape(-1))
        look_up(HIGH_SIGNS, packed, high.reshape(-1))
        with np.errstate(invalid="ignore"):
            np.multiply(rows, levels[:, :1], out=rows)
            np.multiply(high, levels[:, 1:], out=high)
            np.add(rows, high, out=rows)


def _lloyd(magnitudes: Rows) -> NDArray[np.float32]:
    """Each row's two levels, (rows, 2), low first: means of the magnitudes below and above their midpoint."""
    width = np.float32(magnitudes.shape[1])
    total = np.add.reduce(magnitudes, axis=1)
    border = total / width
    above, part = _flags(magnitudes), scratch("part", magnitudes.size, np.float32).reshape(magnitudes.shape)
    low = high = border
    for _ in range(LLOYD_PASSES):
        np.greater(magnitudes, border[:, None], out=above)
        count = np.add.reduce(above, axis=1, dtype=np.float32)
        sum_above = np.add.reduce(np.multiply(magnitudes, above, out=part), axis=1)
        high = np.where(count > 0, sum_above / np.maximum(count, 1), border)
        low = (total - sum_above) / np.maximum(width - count, 1)
        border = (low + high) / 2
    return np.stack([low, high], axis=1)


def _flags(rows: Rows) -> NDArray[np.bool_]:
    return scratch("flags", rows.size, np.bool_).reshape(rows.shape)


def _powers_of_two(largest: NDArray[np.uint32]) -> NDArray[np.float32]:
    """The power of two below each value, kept where it and its inverse are normal."""
    exponents = np.minimum(np.maximum(largest >> 23, np.uint32(1)), np.uint32(252))
    unit: NDArray[np.float32] = (exponents << 23).view(np.float32)
    return unit


def _widened(scales: Bytes) -> NDArray[np.float32]:
    patterns = scales.view(np.uint16)
    values = np.empty(patterns.size, np.float32)
    widen_bf16(patterns, values)
    return values


INT4_VALUES = table_of([*range(8), *range(-8, 0)], 4)
LOW_SIGNS = table_of([1, 0, -1, 0], 2)
HIGH_SIGNS = table_of([0, 1, 0, -1], 2)

INT8 = GroupedCodec("INT8", Uniform(bits=8, largest=127, code_dtype="I8"), group=256)
INT4 = GroupedCodec("INT4", Uniform(bits=4, largest=7, code_dtype="U8"), group=256)
INT2 = GroupedCodec("INT2", FourLevels(), group=256)
