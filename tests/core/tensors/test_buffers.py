"""Statistics keep their bits beside anything, in every range that a merge reads, and neighbours keep their scales."""

from dataclasses import replace

import numpy as np
import pytest

from gradientmail_core.tensors.buffers import ExactBuffers, buffer_spans, wire_codec
from gradientmail_core.tensors.codecs import BLOCK, NAMED, codec_named
from gradientmail_core.tensors.payload import data_parts, encode_payload, parse_payload
from gradientmail_core.tensors.schema import FragmentLayout, Piece

LOSSY = [name for name, codec in NAMED.items() if not codec.lossless] + ["TOPK(64/4096,INT2)"]


def layout_of(*sizes: tuple[str, int]) -> FragmentLayout:
    pieces, offset = [], 0
    for number, (role, size) in enumerate(sizes):
        pieces.append(Piece(f"t{number}", (size,), offset, role="buffer" if role == "buffer" else "vector"))
        offset += size
    return FragmentLayout(0, tuple(pieces))


LAYOUT = layout_of(("vector", 37), ("buffer", 5), ("vector", BLOCK), ("buffer", BLOCK), ("buffer", 3), ("vector", 900))
NOISE = np.random.default_rng(5).standard_normal(LAYOUT.size).astype(np.float32)


@pytest.mark.parametrize("name", LOSSY)
def test_buffers_keep_every_bit_in_any_range(name: str) -> None:
    codec = wire_codec(LAYOUT, name)
    body = encode_payload(LAYOUT, codec, NOISE, lambda data: {"data": data})
    payload = parse_payload(body, LAYOUT, codec)
    assert not hasattr(payload, "reason")
    exact = np.zeros(LAYOUT.size, bool)
    for span in buffer_spans(LAYOUT):
        exact[span] = True
    for start, stop in [
        (0, LAYOUT.size),
        (0, 40),
        (BLOCK, BLOCK + 60),
        (BLOCK, 2 * BLOCK + 50),
        (2 * BLOCK, LAYOUT.size),
    ]:
        out = np.full(stop - start, np.nan, np.float32)
        codec.decode(data_parts(body, LAYOUT, codec), start, stop, out)
        assert np.array_equal(out[exact[start:stop]], NOISE[start:stop][exact[start:stop]])
        assert np.isfinite(out).all() and not np.array_equal(out, NOISE[start:stop])


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_trained_is_coded_as_if_buffers_were_zero(name: str) -> None:
    """A statistic of a million moves no scale."""
    codec, rest = wire_codec(LAYOUT, name), NOISE.copy()
    for span in buffer_spans(LAYOUT):
        rest[span] = 0.0
    loud = np.where(rest == 0.0, np.float32(1e6), rest)
    body = encode_payload(LAYOUT, codec, loud, lambda data: {"data": data})
    plain = encode_payload(LAYOUT, codec_named(name), rest, lambda data: {"data": data})
    ours, theirs = data_parts(body, LAYOUT, codec)[1:], data_parts(plain, LAYOUT, codec_named(name))
    assert [part.tobytes() for part in ours] == [part.tobytes() for part in theirs]


def test_a_value_that_is_not_finite_stays_visible() -> None:
    bad = NOISE.copy()
    bad[38] = np.nan
    codec = wire_codec(LAYOUT, "INT4")
    body = encode_payload(LAYOUT, codec, bad, lambda data: {"data": data})
    out = np.empty(64, np.float32)
    codec.decode(data_parts(body, LAYOUT, codec), 0, 64, out)
    assert np.isnan(out[38]) and np.isfinite(np.delete(out, 38)).all()


def test_without_buffers_or_loss_a_codec_is_itself() -> None:
    plain = replace(LAYOUT, pieces=tuple(replace(piece, role="vector") for piece in LAYOUT.pieces))
    assert wire_codec(plain, "int4") is codec_named("INT4")
    assert wire_codec(LAYOUT, "F32") is codec_named("F32")
    assert isinstance(wire_codec(LAYOUT, "bf16"), ExactBuffers)
