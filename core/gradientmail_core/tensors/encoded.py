"""A fragment in the bytes of its codec, read span by span without being decoded whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.parts import Bytes, Codec


class Encoded(Protocol):
    """One node's delta in its compact form."""

    def read(self, start: int, stop: int, out: Flat) -> Flat:
        """Elements ``start`` to ``stop``, in ``out`` or as a view of where they lie, which is not to be written.

        ``start`` is a multiple of ``BLOCK``; ``out`` is fp32 of ``stop - start`` elements. Several threads may read.
        """
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """The raw bytes of each part of ``codec``, in memory."""

    codec: Codec
    parts: Sequence[Bytes]

    def read(self, start: int, stop: int, out: Flat) -> Flat:
        """Values that lie there as they are spare the copy."""
        if holds_values(self.codec):
            return self.parts[0].view(np.float32)[start:stop]
        self.codec.decode(self.parts, start, stop, out)
        return out


def holds_values(codec: Codec) -> bool:
    """True if the bytes of ``codec`` are the fp32 values themselves."""
    return codec.lossless and codec.elementwise and codec.parts(1)[0].dtype == "F32"
