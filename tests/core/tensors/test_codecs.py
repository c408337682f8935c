"""What holds for every codec. What is particular to one is tested beside its own module."""

import numpy as np
import pytest
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codecs import BLOCK, NAMED, codec_named
from gradientmail_core.tensors.payload import Payload, encode_payload, parse_payload
from gradientmail_core.tensors.schema import FragmentLayout, Piece

SPARSE = ["TOPK(64/4096,INT2)", "TOPK(4/4096,F32)", "TOPK(44/4096,F4)", "TOPK(412/4096,INT8)", "TOPK(4096/4096,BF16)"]
ALL = [*NAMED, *SPARSE]
LOSSY = [name for name in ALL if name != "F32"]
RELATIVE_ERROR = {
    "F32": 0.0, "F16": 0.001, "BF16": 0.003, "F8_E4M3": 0.03, "F4": 0.125, "F4_E3M0": 0.21,
    "INT8": 0.008, "INT4": 0.14, "INT2": 0.36,
}  # fmt: skip
"""Most of the norm of normal values that may be lost."""


def normal(size, seed=0, scale=1.0):
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32) * np.float32(scale)


def encoded(codec, values):
    out = [np.full(part.nbytes, 0xAA, np.uint8) for part in codec.parts(values.size)]
    codec.encode(values, out)
    return out


def decoded(codec, parts, start, stop):
    out = np.full(stop - start, 7, np.float32)
    codec.decode(parts, start, stop, out)
    return out


def through(codec, values):
    return decoded(codec, encoded(codec, values), 0, values.size)


def norm(values):
    return float(np.linalg.norm(values.astype(np.float64)))


@pytest.mark.parametrize("name", ALL)
def test_a_name_gives_the_codec_that_has_it(name):
    assert codec_named(name).name == name == codec_named(name.lower()).name
    assert codec_named(name) == codec_named(codec_named(name).name)


def test_densities_are_rounded_to_whole_chunks():
    assert codec_named("topk(0.015625, int2)").name == "TOPK(64/4096,INT2)"
    assert codec_named("TOPK(1,F32)").name == "TOPK(4096/4096,F32)"
    assert codec_named("TOPK(.0001,F4)").name == "TOPK(4/4096,F4)"


@pytest.mark.parametrize(
    "name",
    ["", "F33", "FLOAT32", "TOPK", "TOPK(64/4096)", "TOPK(63/4096,INT2)", "TOPK(0/4096,F32)", "TOPK(4100/4096,F32)",
     "TOPK(2.0,F32)", "TOPK(64/4096,TOPK)", "TOPK(64/4095,F32)", "TOPK(1e-3,F32)", "TOPK(64/4096,F32)x"],
)  # fmt: skip
def test_other_names_are_refused(name):
    with pytest.raises(ConfigurationError):
        codec_named(name)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 31, 33, 255, 257, 4095, 4097, BLOCK + 1])
def test_every_size_round_trips_within_the_error_of_the_format(name, size):
    codec, values = codec_named(name), normal(size)
    parts = encoded(codec, values)
    assert [part.nbytes for part in codec.parts(size)] == [len(part) for part in parts]
    back = decoded(codec, parts, 0, size)
    assert np.isfinite(back).all()
    if name in RELATIVE_ERROR and size > 1000:
        assert norm(back - values) <= RELATIVE_ERROR[name] * norm(values)
    assert norm(back - values) <= norm(values)


@pytest.mark.parametrize("name", ALL)
def test_any_range_that_starts_at_a_block_decodes_to_the_same_bytes(name):
    size = 3 * BLOCK + 4096 + 17
    codec, values = codec_named(name), normal(size)
    parts = encoded(codec, values)
    whole = decoded(codec, parts, 0, size)
    ranges = [(0, 0), (0, 5), (BLOCK, 2 * BLOCK), (BLOCK, BLOCK + 4099), (BLOCK, 3 * BLOCK + 1), (2 * BLOCK, size)]
    for start, stop in [*ranges, (3 * BLOCK, size), (3 * BLOCK, 3 * BLOCK + 4096), (3 * BLOCK, size - 1)]:
        assert np.array_equal(decoded(codec, parts, start, stop), whole[start:stop]), (start, stop)


@pytest.mark.parametrize("name", ALL)
def test_the_encoding_does_not_depend_on_what_was_encoded_before(name):
    codec, values = codec_named(name), normal(5000)
    first = [part.tobytes() for part in encoded(codec, values)]
    encoded(codec, normal(BLOCK, 1, 1e20))
    assert [part.tobytes() for part in encoded(codec, values)] == first


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zeros_between_groups_that_are_not(name, zero):
    values = np.full(3 * 4096 + 5, zero, np.float32)
    values[4096:8192] = normal(4096)
    back = through(codec_named(name), values)
    assert not back[:4096].any() and not back[8192:].any() and back[4096:8192].any()


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith(("F16", "TOPK"))])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 256, 599])
def test_a_value_that_is_not_finite_stays_visible_and_stays_in_its_group(name, bad, place):
    values = normal(600)
    values[place] = bad
    back = through(codec_named(name), values)
    assert not np.isfinite(back[place])
    elsewhere = np.arange(600) // 256 != place // 256
    assert np.isfinite(back[elsewhere]).all()


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sparse_codecs_always_send_a_value_that_is_not_finite(name, bad):
    values = normal(9000)
    values[8999] = bad
    back = through(codec_named(name), values)
    assert not np.isfinite(back[8999]) and np.isfinite(back[:8192]).all()


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 5000),
    seed=st.integers(0, 2**16),
    exponent=st.integers(-44, 37),
    spread=st.integers(0, 20),
    large=st.sampled_from([0.0, 3e38, -3e38]),
)
def test_finite_values_of_any_magnitude_come_back_finite_and_no_larger_an_error_than_themselves(
    name, size, seed, exponent, spread, large
):
    if name == "F16" and (exponent > 2 or large):
        return
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(size) * 10.0**exponent * 10.0 ** -rng.integers(0, spread + 1, size)).astype(
        np.float32
    )
    values[rng.integers(size)] += np.float32(large)
    back = through(codec_named(name), values)
    assert np.isfinite(back).all()
    assert norm(back - values) <= norm(values) * (1 + 1e-6) + 2.0**-126 * size


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=5, deadline=None)
@given(shapes=st.lists(st.sampled_from([(), (0,), (3, 0), (1,), (7, 9), (130, 41)]), max_size=4))
def test_payloads_of_any_shapes_are_read_by_stock_safetensors(name, shapes):
    pieces, offset = [], 0
    for index, shape in enumerate(shapes):
        pieces.append(Piece(f"w{index}", shape, offset))
        offset += pieces[-1].elements
    layout, codec = FragmentLayout(0, tuple(pieces)), codec_named(name)
    values = normal(layout.size)
    body = bytes(encode_payload(layout, codec, values, lambda digest: {"data": digest}))
    loaded = safetensors.torch.load(body)
    assert sum(tensor.nbytes for tensor in loaded.values()) == sum(part.nbytes for part in codec.parts(layout.size))
    payload = parse_payload(body, layout, codec)
    assert isinstance(payload, Payload)
    assert np.array_equal(decoded(codec, payload.parts, 0, layout.size), through(codec, values))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 9000))
def test_any_bytes_of_the_right_length_decode_without_an_error(name, seed, size):
    codec, rng = codec_named(name), np.random.default_rng(seed)
    parts = [rng.integers(0, 256, part.nbytes, dtype=np.uint8) for part in codec.parts(size)]
    assert decoded(codec, parts, 0, size).shape == (size,)


def test_sizes_on_the_wire_are_those_documented():
    def bits(name):
        return sum(part.nbytes for part in codec_named(name).parts(2**20)) * 8 / 2**20

    assert [bits(name) for name in ("F8_E4M3", "F4", "F4_E3M0", "INT8", "INT4", "INT2")] == [
        8 + 8 / 256, 4 + 8 / 32, 4 + 8 / 32, 8 + 16 / 256, 4 + 16 / 256, 2 + 32 / 256,
    ]  # fmt: skip
    assert bits("TOPK(64/4096,INT2)") == 64 * (12 + 2) / 4096 + 32 / 4096
