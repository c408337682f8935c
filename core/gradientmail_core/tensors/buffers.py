"""Merged buffers on the wire: statistics such as a BatchNorm's travel in fp32 whatever codec their neighbours take.

A running variance may be a thousandth of what it was a cycle ago. Its delta, rounded to a few bits or to bf16, can be
larger than what was left of it, and the mean over nodes would be a variance below zero, whose root is NaN. So a lossy
codec sees zeros where buffers lie, which moves no neighbour's scale, and the values follow in a part of their own.
They are few; a fragment without buffers is encoded as ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.parts import Bytes, Codec, PartSpec
from gradientmail_core.tensors.schema import FragmentLayout

PART = "buffers"


def buffer_spans(layout: FragmentLayout) -> tuple[slice, ...]:
    """Where the buffers of a fragment lie, in the order of their offsets."""
    return tuple(
        slice(piece.offset, piece.offset + piece.elements) for piece in layout.pieces if piece.role == "buffer"
    )


def wire_codec(layout: FragmentLayout, name: str) -> Codec:
    """The codec called ``name`` as it is used for ``layout``: exact where buffers lie."""
    codec, spans = codec_named(name), buffer_spans(layout)
    return ExactBuffers(codec, spans) if spans and not codec.lossless else codec


@dataclass(frozen=True, slots=True)
class ExactBuffers:
    """The codec ``coarse`` with the elements of ``spans`` in fp32 beside it."""

    coarse: Codec
    spans: tuple[slice, ...]
    lossless: bool = False
    elementwise: bool = False

    @property
    def name(self) -> str:
        """That of the codec: layout and name make the rest."""
        return self.coarse.name

    def parts(self, size: int) -> tuple[PartSpec, ...]:
        """The buffers, then the codec's own parts."""
        count = sum(span.stop - span.start for span in self.spans)
        return (PartSpec(PART, "F32", count), *self.coarse.parts(size))

    def encode(self, values: Flat, out: Sequence[Bytes]) -> None:
        """Encode a copy without the buffers, and set them beside it."""
        rest, exact, place = values.copy(), out[0].view("<f4"), 0
        for span in self.spans:
            exact[place : place + span.stop - span.start] = values[span]
            place += span.stop - span.start
            rest[span] = 0.0
        self.coarse.encode(rest, out[1:])

    def decode(self, parts: Sequence[Bytes], start: int, stop: int, out: Flat) -> None:
        """Decode, and put the buffers that lie in the range in their places."""
        self.coarse.decode(parts[1:], start, stop, out)
        exact, place = parts[0].view("<f4"), 0
        for span in self.spans:
            first, last = max(span.start, start), min(span.stop, stop)
            if first < last:
                out[first - start : last - start] = exact[place + first - span.start : place + last - span.start]
            place += span.stop - span.start
