"""What a codec is, and the parts it makes: flat little-endian arrays whose sizes follow from the element count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors.model import Flat

Bytes: TypeAlias = NDArray[np.uint8]

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}
"""Bytes of one element of the safetensors dtypes that codecs use."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One array of an encoded fragment: ``count`` elements of the safetensors ``dtype``."""

    name: str
    dtype: str
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.count * ELEMENT_BYTES[self.dtype]


class Codec(Protocol):
    """A wire format for flat fp32 fragments; stateless, so one instance serves all threads.

    ``name`` is its canonical text form, which ``codec_named`` parses back. A ``lossless`` codec decodes
    to the same bits. An ``elementwise`` codec has one part, of ``size`` elements in the order of the
    fragment, so that a payload can show each tensor by its own name and shape.
    """

    @property
    def name(self) -> str:
        """Canonical text form."""
        ...

    @property
    def lossless(self) -> bool:
        """True if decoding gives back every bit."""
        ...

    @property
    def elementwise(self) -> bool:
        """True if part 0 is the only part and holds the elements one by one."""
        ...

    def parts(self, size: int) -> tuple[PartSpec, ...]:
        """The parts of an encoded fragment of ``size`` elements."""
        ...

    def encode(self, values: Flat, out: Sequence[Bytes]) -> None:
        """Write the parts of ``values`` (flat, contiguous fp32) into ``out``, raw bytes of each part."""
        ...

    def decode(self, parts: Sequence[Bytes], start: int, stop: int, out: Flat) -> None:
        """Write elements ``start`` to ``stop`` of the fragment into ``out``; ``start`` is a multiple of BLOCK."""
        ...
