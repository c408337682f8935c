"""Element-for-element floating-point formats: F32 as it is, F16 and BF16 rounded to nearest even.

The error of a value x is at most ``|x|·2^-11`` for F16 (``2^-25`` below its normal range, 2^-14) and
``|x|·2^-8`` for BF16. Values that round past the format's largest become infinite, infinities and NaNs
stay what they are: what cannot be represented decodes as not finite and is refused, never quietly wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors.kernels import for_blocks, scratch
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.parts import Bytes, PartSpec

BF16_NAN = 0x7FC0


@dataclass(frozen=True, slots=True)
class F32:
    """The values themselves, 4 bytes each."""

    name = "F32"
    lossless = True
    elementwise = True

    def parts(self, size: int) -> tuple[PartSpec, ...]:
        """One part, ``values``."""
        return (PartSpec("values", "F32", size),)

    def encode(self, values: Flat, out: Sequence[Bytes]) -> None:
        """Copy."""
        body = out[0].view(np.float32)
        for_blocks(values.size, lambda i, j: np.copyto(body[i:j], values[i:j]))

    def decode(self, parts: Sequence[Bytes], start: int, stop: int, out: Flat) -> None:
        """Copy."""
        body = parts[0].view(np.float32)[start:stop]
        for_blocks(out.size, lambda i, j: np.copyto(out[i:j], body[i:j]))


@dataclass(frozen=True, slots=True)
class F16:
    """IEEE half precision, 2 bytes each; finite up to 65504."""

    name = "F16"
    lossless = False
    elementwise = True

    def parts(self, size: int) -> tuple[PartSpec, ...]:
        """One part, ``values``."""
        return (PartSpec("values", "F16", size),)

    def encode(self, values: Flat, out: Sequence[Bytes]) -> None:
        """Round each value."""
        body = out[0].view(np.float16)

        def block(start: int, stop: int) -> None:
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                np.copyto(body[start:stop], values[start:stop], casting="same_kind")

        for_blocks(values.size, block)

    def decode(self, parts: Sequence[Bytes], start: int, stop: int, out: Flat) -> None:
        """Widen each value, exactly."""
        body = parts[0].view(np.float16)[start:stop]

        def block(first: int, last: int) -> None:
            with np.errstate(invalid="ignore"):
                np.copyto(out[first:last], body[first:last])

        for_blocks(out.size, block)


@dataclass(frozen=True, slots=True)
class BF16:
    """The upper half of a float32, 2 bytes each; the range of fp32, 8 bits of precision."""

    name = "BF16"
    lossless = False
    elementwise = True

    def parts(self, size: int) -> tuple[PartSpec, ...]:
        """One part, ``values``."""
        return (PartSpec("values", "BF16", size),)

    def encode(self, values: Flat, out: Sequence[Bytes]) -> None:
        """Round each value."""
        body = out[0].view(np.uint16)
        for_blocks(values.size, lambda i, j: round_to_bf16(values[i:j], body[i:j]))

    def decode(self, parts: Sequence[Bytes], start: int, stop: int, out: Flat) -> None:
        """Widen each value, exactly."""
        body = parts[0].view(np.uint16)[start:stop]
        for_blocks(out.size, lambda i, j: widen_bf16(body[i:j], out[i:j]))


def round_to_bf16(values: Flat, out: NDArray[np.uint16]) -> None:
    """Nearest-even bfloat16 of one block, as bit patterns in ``out``; NaNs keep their sign and stay NaNs.

    Adding 0x7fff, and one more if the kept part is odd, carries into the upper half exactly when the
    value rounds up. A NaN could carry into another number, so blocks that hold one are mended.
    """
    bits = values.view(np.uint32)
    rounded = scratch("bf16", values.size, np.uint32)
    np.right_shift(bits, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, 16, out=rounded)
    np.copyto(out, rounded, casting="unsafe")
    finite = np.isfinite(values, out=scratch("bf16 finite", values.size, np.bool_))
    if not finite.all():
        nan = np.isnan(values)
        out[nan] = (bits[nan] >> 16).astype(np.uint16) | BF16_NAN


def widen_bf16(patterns: NDArray[np.uint16], out: Flat) -> None:
    """The float32 of each bfloat16 bit pattern, of one block."""
    bits = out.view(np.uint32)
    np.copyto(bits, patterns)
    np.left_shift(bits, 16, out=bits)
