import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.compression import (
    CHUNK,
    HEAD,
    MAGIC,
    TAG,
    Speeds,
    compress,
    decompress,
    element_bytes,
    is_compressed,
    worth_compressing,
)
from gradientmail_core.tensors.payload import Malformed, encode_payload, parse_payload
from gradientmail_core.tensors.schema import FragmentLayout, Piece


def deltas(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32) * np.float32(1e-4)


def bf16(values):
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize("width", [1, 2, 4])
@settings(max_examples=40, deadline=None)
@given(body=st.binary(max_size=300))
def test_any_bytes_come_back(width, body):
    packed = compress(body, width)
    assert is_compressed(packed) and bytes(decompress(packed, len(body))) == body


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_several_chunks_and_bytes_left_over_come_back(width, extra):
    body = deltas((2 * CHUNK + 1000) * width // 4).tobytes() + b"x" * extra
    assert bytes(decompress(compress(body, width), len(body))) == body


def test_it_is_a_sequence_of_standard_frames_that_hold_byte_planes():
    body = bf16(deltas(1000)) + b"!"
    plain = zstandard.ZstdDecompressor().stream_reader(bytes(compress(body, 2)), read_across_frames=True).read()
    assert plain == body[0:2000:2] + body[1:2000:2] + b"!"


def test_bf16_deltas_shrink_below_seven_tenths():
    body = bf16(deltas(CHUNK))
    assert len(compress(body, 2)) < 0.69 * len(body) < len(zstandard.compress(body, 1))


def test_fp32_deltas_shrink_below_seventeen_twentieths():
    body = deltas(CHUNK).tobytes()
    assert len(compress(body, 4)) < 0.85 * len(body)


def test_a_payload_survives_and_no_payload_looks_compressed():
    layout, codec = FragmentLayout(0, (Piece("w", (700, 3), 0),)), codec_named("BF16")
    body = encode_payload(layout, codec, deltas(2100), lambda digest: {"data": digest})
    assert not is_compressed(body)
    back = decompress(compress(body, element_bytes(codec)), len(body))
    assert back == body
    payload = parse_payload(back, layout, codec)
    assert payload.sha256 == payload.metadata["data"]


def test_element_widths_follow_the_codec():
    widths = [element_bytes(codec_named(name)) for name in ("F32", "F16", "BF16", "INT8", "F4", "TOPK(64/4096,F32)")]
    assert widths == [4, 2, 2, 1, 1, 1]
    with pytest.raises(ConfigurationError, match="3 bytes"):
        compress(b"abc", 3)


def head(size, count, width=1, tag=TAG):
    return HEAD.pack(MAGIC, HEAD.size - 8 + 4 * count, tag, width, size)


def container(size, frames, width=1):
    sizes = struct.pack(f"<{len(frames)}I", *map(len, frames))
    return head(size, len(frames), width) + sizes + b"".join(frames)


def frame(body, **options):
    return zstandard.ZstdCompressor(**options).compress(body)


GOOD = container(8, [frame(b"12345678")])


def test_a_container_built_by_hand_is_read():
    assert bytes(decompress(GOOD, 8)) == b"12345678"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        GOOD[:20],
        GOOD[:-1],
        GOOD + b"\0",
        b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8,
        frame(b"12345678"),
        head(2**40, 1)[:13],
        head(2**40, 2**20),
        head(8, 2**28),
        head(8, 0),
        head(8, 1),
        head(8, 1, width=3) + GOOD[HEAD.size :],
        head(8, 1, tag=b"gmz2") + GOOD[HEAD.size :],
        container(8, [frame(b"1234567")]),
        container(8, [frame(b"123456789")]),
        container(8, [frame(b"12345678", write_content_size=False)]),
        container(8, [frame(b"1234") + frame(b"5678")]),
        container(8, [struct.pack("<II", 0x184D2A50, 8) + b"12345678"]),
        container(8, [frame(b"12345678")[:-2]]),
        container(8, [b""]),
        container(8, [frame(b"1234"), frame(b"5678")]),
        container(8, [frame(b"1234"), frame(b"56789")], width=2),
        container(0, [frame(b"")]),
    ],
    ids=range(23),
)
def test_anything_else_is_malformed(body):
    assert isinstance(decompress(body, 8), Malformed)


def test_a_few_bytes_cannot_reserve_many():
    claims_much = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", 2**20)
    bombs = [
        container(2**40, [frame(b"")]),
        container(2**30, [claims_much] * 2**10),
        container(2**30, [frame(b"\0" * 2**20)] * 2**9),
    ]
    tracemalloc.start()
    try:
        for bomb in bombs:
            assert isinstance(decompress(bomb, 2**28), Malformed)
            assert isinstance(decompress(bomb, 10), Malformed)
        assert isinstance(decompress(container(8, [claims_much]), 2**40), Malformed)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_damage_is_malformed_or_shows_in_the_digest_but_never_raises(place, bit):
    body = bf16(deltas(500))
    packed = bytearray(compress(body, 2))
    packed[place % len(packed)] ^= 1 << bit
    back = decompress(packed, len(body))
    assert isinstance(back, Malformed) or len(back) <= len(body)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_noise_after_a_good_start_is_malformed(noise):
    decompress(GOOD[: HEAD.size] + noise, 8)
    assert isinstance(decompress(noise, 8), Malformed)


def test_slow_links_are_worth_compressing_for_and_fast_ones_not():
    gigabit = 125e6
    assert worth_compressing(gigabit) and worth_compressing(None) and not worth_compressing(10 * gigabit)
    assert 300e6 < Speeds().break_even < 600e6
    assert not worth_compressing(gigabit, Speeds(ratio=1.0))
