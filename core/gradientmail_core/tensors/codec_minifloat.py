"""F8_E4M3, F4 and F4_E3M0: small floats under a power-of-two scale for each group.

A format is the list of its magnitudes. Rounding is to nearest, ties to the even code, and is one table
look-up: the index is the upper 16 bits of the scaled float32, with the lowest one set if any bit below
is (rounding to odd). No format here has more than four bits before its rounding point, so the sixteen
bits decide as all thirty-two would.

The scale is ``2^(byte - 127)``, the smallest under which the group's largest value rounds to no more than
the format's largest magnitude. So no value below about 2.5e38 saturates, the scale itself is exact, and
with ``m`` mantissa bits, smallest normal exponent ``e`` and scale ``s`` the error of ``x`` is at most
``max(|x|·2^-(m+1), s·2^(e-m-1))``. The byte 255 marks a group that was not finite.

* ``F8_E4M3`` (OCP FP8): groups of 256, largest 448; ``|x|/16``, at least ``amax/232·2^-10``.
* ``F4`` (E2M1; OCP MX): groups of 32, magnitudes 0 ½ 1 1½ 2 3 4 6; ``|x|/4``, at least ``amax/14``.
* ``F4_E3M0`` (the format of Streaming DiLoCo, arXiv 2501.18512): groups of 32, zero and the powers of two
  from ¼ to 16; ``|x|/2``, at least ``amax/96``.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors.codec_groups import (
    INFINITE,
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

NOT_FINITE = 255


@dataclass(frozen=True, slots=True)
class Minifloat:
    """A sign bit over ``bits - 1`` bits that index ``magnitudes`` (ascending, finite, from zero).

    ``step_up`` is the magnitude that would come next; ``nan`` the code of NaN, sign aside, if there is one.
    """

    bits: int
    magnitudes: tuple[float, ...]
    step_up: float
    nan: int | None = None
    code_dtype: str = "U8"
    scale_dtype: str = "U8"
    scales_per_group: int = 1

    def encode(self, rows: Rows, scales: Bytes, packed: Bytes) -> None:
        """Scale each row, round, pack."""
        exponents = self._scale_bytes(largest_magnitudes(rows))
        np.copyto(scales, exponents, casting="unsafe")
        inverse = (np.maximum(254 - exponents, 0) << 23).astype(np.uint32).view(np.float32)
        scaled = scratch("scaled", rows.size, np.float32).reshape(rows.shape)
        with np.errstate(invalid="ignore", under="ignore"):
            np.multiply(rows, inverse[:, None], out=scaled)
        codes = packed if self.bits == 8 else codes_for(rows)
        np.take(_rounding(self), _odd_rounded(scaled.reshape(-1)), out=codes, mode="clip")
        if self.bits != 8:
            pack(codes, self.bits, packed)

    def decode(self, packed: Bytes, scales: Bytes, rows: Rows) -> None:
        """Look up and scale."""
        look_up(_values(self), packed, rows.reshape(-1))
        factors = (scales.astype(np.uint32) << 23).view(np.float32)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            np.multiply(rows, factors[:, None], out=rows)

    def _scale_bytes(self, largest: NDArray[np.uint32]) -> NDArray[np.int32]:
        """The biased exponent of each row's scale, from the bits of its largest value.

        A float's exponent field grows by one at the value from which the format would have to round up
        past its largest magnitude, if the distance of that value to the next power of two is added.
        """
        top = int(np.float32(self.magnitudes[-1]).view(np.uint32)) >> 23
        overflow = int(np.float32((self.magnitudes[-1] + self.step_up) / 2).view(np.uint32)) & 0x7FFFFF
        exponents = ((largest + np.uint32(0x800000 - overflow)) >> 23).astype(np.int32) - (top - 127)
        np.minimum(np.maximum(exponents, 1), 254 - (top - 127), out=exponents)
        exponents[largest >= INFINITE] = NOT_FINITE
        return exponents


def _odd_rounded(values: NDArray[np.float32]) -> NDArray[np.intp]:
    """The upper 16 bits of each value, the lowest set if the value has any bit below."""
    bits = values.view(np.uint32)
    upper = scratch("upper", values.size, np.uint32)
    np.bitwise_and(bits, 0xFFFF, out=upper)
    np.add(upper, 0xFFFF, out=upper)
    np.bitwise_or(upper, bits, out=upper)
    np.right_shift(upper, 16, out=upper)
    places = scratch("places", values.size, np.intp)
    np.copyto(places, upper, casting="unsafe")
    return places


@functools.cache
def _rounding(format: Minifloat) -> Bytes:
    """The code of each of the 65536 upper halves of a float32."""
    magnitudes = np.array(format.magnitudes)
    halfway = (magnitudes[1:] + magnitudes[:-1]) / 2
    patterns = np.arange(2**15, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        values = (patterns << 16).view(np.float32).astype(np.float64)
    codes = np.searchsorted(halfway, values, side="left")
    codes += np.isin(values, halfway) & (codes % 2 == 1)
    codes[np.isnan(values)] = format.magnitudes.index(format.magnitudes[-1]) if format.nan is None else format.nan
    sign = 1 << (format.bits - 1)
    return np.concatenate([codes, codes | sign]).astype(np.uint8)


@functools.cache
def _values(format: Minifloat) -> NDArray[np.float32]:
    """For each byte, the values of its codes."""
    positive = list(format.magnitudes) + ([] if format.nan is None else [float("nan")])
    return table_of(positive + [-value for value in positive], format.bits)


E4M3 = Minifloat(
    bits=8,
    magnitudes=(
        *(fraction * 2.0**-9 for fraction in range(8)),
        *[(8 + fraction) * 2.0**exponent for exponent in range(-9, 6) for fraction in range(8)][:-1],
    ),
    step_up=480.0,
    nan=0x7F,
    code_dtype="F8_E4M3",
)
E2M1 = Minifloat(bits=4, magnitudes=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), step_up=8.0)
E3M0 = Minifloat(bits=4, magnitudes=(0.0, *(2.0**exponent for exponent in range(-2, 5))), step_up=32.0)

F8_E4M3 = GroupedCodec("F8_E4M3", E4M3, group=256)
F4 = GroupedCodec("F4", E2M1, group=32)
F4_E3M0 = GroupedCodec("F4_E3M0", E3M0, group=32)
