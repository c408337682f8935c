import hashlib
import json
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.kernels import BLOCK
from gradientmail_core.tensors.payload import (
    HEADER_BYTES_MAX,
    METADATA_BYTES_MAX,
    Malformed,
    Payload,
    encode_payload,
    encode_tensors,
    parse_payload,
    payload_bytes_max,
    read_metadata,
)
from gradientmail_core.tensors.schema import FragmentLayout, Piece


def layout_of(shapes):
    pieces, offset = [], 0
    for index, shape in enumerate(shapes):
        piece = Piece(f"layer.{index}", tuple(shape), offset)
        pieces.append(piece)
        offset += piece.elements
    return FragmentLayout(0, tuple(pieces))


LAYOUT = FragmentLayout(
    2, (Piece("a.weight", (3, 4), 0), Piece("scalar", (), 12), Piece("none", (0, 3), 13), Piece("é", (5,), 13, (2, 7)))
)
F32 = codec_named("F32")


def values_for(layout, seed=0):
    return np.random.default_rng(seed).standard_normal(layout.size, dtype=np.float32)


def described(digest):
    return {"data": digest, "record": "{}"}


def body_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def good_header(layout=LAYOUT):
    body = bytes(encode_payload(layout, F32, values_for(layout), described))
    end = 8 + struct.unpack_from("<Q", body)[0]
    return json.loads(body[8:end]), body[end:]


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@settings(max_examples=25, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5))
def test_a_payload_comes_back_for_any_shapes(name, shapes):
    layout, codec = layout_of(shapes), codec_named(name)
    values = values_for(layout)
    body = encode_payload(layout, codec, values, described)
    payload = parse_payload(body, layout, codec)
    assert isinstance(payload, Payload)
    out = np.empty(layout.size, np.float32)
    codec.decode(payload.parts, 0, layout.size, out)
    assert np.allclose(out, values, rtol=2**-8, atol=1e-7)
    assert payload.metadata == described(payload.sha256) == read_metadata(bytes(body))
    assert len(body) <= payload_bytes_max(layout, codec)


def test_the_digest_is_of_the_data_section_and_the_data_is_aligned():
    body = encode_payload(LAYOUT, F32, values_for(LAYOUT), described)
    data = bytes(body)[-LAYOUT.size * 4 :]
    assert data == values_for(LAYOUT).tobytes()
    assert read_metadata(body)["data"] == hashlib.sha256(data).hexdigest()
    assert (len(body) - len(data)) % 64 == 0


def test_stock_safetensors_reads_each_tensor_by_name_and_shape():
    values = values_for(LAYOUT)
    for name, library in [("F32", safetensors.numpy), ("F16", safetensors.numpy), ("BF16", safetensors.torch)]:
        loaded = library.load(bytes(encode_payload(LAYOUT, codec_named(name), values, described)))
        assert {key: tuple(tensor.shape) for key, tensor in loaded.items()} == {
            "a.weight": (3, 4), "scalar": (), "none": (0, 3), "é[2:7]": (5,),
        }  # fmt: skip
        assert torch.allclose(torch.as_tensor(loaded["é[2:7]"]).float(), torch.from_numpy(values[13:]), rtol=2**-8)


def test_a_view_with_strides_is_encoded_as_its_values():
    backing = np.arange(2 * LAYOUT.size, dtype=np.float32)
    strided, flat = (encode_payload(LAYOUT, F32, v, described) for v in (backing[::2], backing[::2].copy()))
    assert strided == flat


def test_values_that_do_not_fit_the_layout_are_refused_before_anything_is_written():
    with pytest.raises(ConfigurationError, match="18 elements"):
        encode_payload(LAYOUT, F32, np.zeros(3, np.float32), described)
    with pytest.raises(ConfigurationError, match="changes size"):
        encode_payload(LAYOUT, F32, values_for(LAYOUT), lambda digest: {"n": "x" * int(digest[-1], 16) * 100})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda h: h["a.weight"].update(dtype="F16"),
        lambda h: h["a.weight"].update(shape=[4, 3]),
        lambda h: h["a.weight"].update(shape=[3.0, 4]),
        lambda h: h["scalar"].update(data_offsets=[0, 4]),
        lambda h: h["a.weight"].update(data_offsets=[0, 10**30]),
        lambda h: h["a.weight"].update(data_offsets=[False, 48]),
        lambda h: h["a.weight"].update(extra=1),
        lambda h: h["a.weight"].pop("shape"),
        lambda h: h.pop("none"),
        lambda h: h.update(more=h["scalar"]),
        lambda h: h.update(scalar=None),
        lambda h: h.update(scalar=[[[[[]]]]]),
        lambda h: h.update(__metadata__={"a": 1}),
        lambda h: h.update(__metadata__=["a"]),
        lambda h: h.update(__metadata__={"a": "\ud800"}),
        lambda h: h.update(__metadata__={"a": "x" * METADATA_BYTES_MAX}),
    ],
)
def test_a_header_that_differs_from_the_layout_is_malformed(spoil):
    header, data = good_header()
    assert isinstance(parse_payload(body_of(header, data), LAYOUT, F32), Payload)
    spoil(header)
    assert isinstance(parse_payload(body_of(header, data), LAYOUT, F32), Malformed)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 8 + b"{}",
        struct.pack("<Q", 2**40) + b"{}",
        body_of(b"[" * 2**20),
        body_of(b'{"a":' * 2**17),
        body_of(b"null"),
        body_of(b"NaN"),
        body_of(b'{"scalar":NaN}'),
        body_of(b'{"a":' + b"9" * 5000 + b"}"),
        body_of(b"\xff\xfe{\0}\0"),
        body_of(b"{}" + b"\0" * 50),
    ],
    ids=range(13),
)
def test_bytes_that_are_no_payload_are_malformed_whatever_they_are(body):
    assert isinstance(parse_payload(body, LAYOUT, F32), Malformed)
    assert isinstance(read_metadata(body), Malformed)


def test_a_name_given_twice_is_malformed():
    header, data = good_header()
    text = json.dumps(header)
    assert isinstance(parse_payload(body_of(text.encode(), data), LAYOUT, F32), Payload)
    twice = '{"scalar":' + json.dumps(header["scalar"]) + "," + text[1:]
    assert isinstance(parse_payload(body_of(twice.encode(), data), LAYOUT, F32), Malformed)
    within = text.replace('"dtype": "F32"', '"dtype": "F32", "dtype": "F32"')
    assert isinstance(parse_payload(body_of(within.encode(), data), LAYOUT, F32), Malformed)


def test_data_of_another_length_is_malformed():
    body = bytes(encode_payload(LAYOUT, F32, values_for(LAYOUT), described))
    assert isinstance(parse_payload(body[:-1], LAYOUT, F32), Malformed)
    assert isinstance(parse_payload(body + b"\0", LAYOUT, F32), Malformed)


def test_a_giant_header_is_refused_before_it_is_read():
    body = bytearray(HEADER_BYTES_MAX + 64)
    struct.pack_into("<Q", body, 0, HEADER_BYTES_MAX + 1)
    tracemalloc.start()
    try:
        assert isinstance(read_metadata(body), Malformed)
        assert isinstance(parse_payload(body, LAYOUT, F32), Malformed)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 700), bit=st.integers(0, 7), cut=st.integers(0, 3))
@example(place=7, bit=7, cut=0)
def test_damage_never_raises_and_damaged_data_changes_the_digest(place, bit, cut):
    body = encode_payload(LAYOUT, F32, values_for(LAYOUT), described)
    data_start = len(body) - LAYOUT.size * 4
    place %= len(body)
    body[place] ^= 1 << bit
    parsed = parse_payload(body[: len(body) - cut], LAYOUT, F32)
    if place >= data_start and cut == 0:
        assert isinstance(parsed, Payload) and parsed.sha256 != parsed.metadata["data"]
    elif cut:
        assert isinstance(parsed, Malformed)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_malformed(noise):
    assert isinstance(parse_payload(noise, LAYOUT, F32), Malformed)
    assert isinstance(parse_payload(struct.pack("<Q", len(noise)) + noise, LAYOUT, F32), Malformed)
    read_metadata(struct.pack("<Q", len(noise)) + noise)


def test_parts_are_views_and_decode_by_block():
    layout = layout_of([(2 * BLOCK + 5,)])
    values = values_for(layout)
    payload = parse_payload(bytes(encode_payload(layout, F32, values, described)), layout, F32)
    out = np.empty(5, np.float32)
    F32.decode(payload.parts, 2 * BLOCK, 2 * BLOCK + 5, out)
    assert np.array_equal(out, values[2 * BLOCK :]) and not payload.parts[0].flags.owndata


def test_exported_tensors_are_read_by_stock_safetensors():
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "step": np.array(7, np.int64),
        "mask": np.array([True, False]),
        "big": np.arange(3, dtype=">f8"),
        "empty": np.zeros((0, 2), np.float16),
    }
    body = bytes(encode_tensors(arrays, {"format": "pt"}))
    loaded = safetensors.numpy.load(body)
    assert loaded.keys() == arrays.keys()
    assert all(
        np.array_equal(loaded[name], array) and loaded[name].shape == array.shape for name, array in arrays.items()
    )
    assert read_metadata(body) == {"format": "pt"}
    assert safetensors.torch.load(body)["step"].item() == 7
    with pytest.raises(ConfigurationError, match="complex128"):
        encode_tensors({"z": np.zeros(1, np.complex128)}, {})
