import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codec_topk import CHUNK, largest_places, pack_twelve, unpack_twelve
from gradientmail_core.tensors.codecs import BLOCK, codec_named


def through(codec, values):
    parts = [np.zeros(part.nbytes, np.uint8) for part in codec.parts(values.size)]
    codec.encode(values, parts)
    out = np.empty(values.size, np.float32)
    codec.decode(parts, 0, values.size, out)
    return out, parts


def by_sorting(row, kept):
    """Places of the largest magnitudes, earlier ones first where equal."""
    return np.sort(np.argsort(-np.abs(row), kind="stable")[:kept])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    rows=st.integers(1, 4),
    width=st.integers(1, 300),
    values=st.integers(1, 50),
    data=st.data(),
)
def test_exactly_the_largest_are_chosen_even_among_ties(seed, rows, width, values, data):
    kept = data.draw(st.integers(1, width))
    table = np.random.default_rng(seed).integers(-values, values, (rows, width)).astype(np.float32)
    places = largest_places(table, kept).reshape(rows, kept)
    for row in range(rows):
        assert np.array_equal(places[row] - row * width, by_sorting(table[row], kept))


@pytest.mark.parametrize(
    "size", [1, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 100, BLOCK + 5, 2 * BLOCK + CHUNK]
)
def test_each_chunk_keeps_its_largest_and_zeroes_the_rest(size):
    values = np.random.default_rng(size).standard_normal(size, dtype=np.float32)
    out, parts = through(codec_named("TOPK(64/4096,F32)"), values)
    expected = np.zeros_like(values)
    kept_in_all = 0
    for start in range(0, size, CHUNK):
        row = values[start : start + CHUNK]
        kept = -(-64 * row.size // CHUNK)
        places = start + by_sorting(row, kept)
        expected[places] = values[places]
        kept_in_all += kept
    assert np.array_equal(out, expected)
    assert len(parts[2]) == kept_in_all * 4 and len(parts[0]) == -(-kept_in_all * 3 // 2)


def test_chunks_of_zeros_and_of_equal_values_keep_their_first():
    values = np.zeros(2 * CHUNK, np.float32)
    values[CHUNK:] = 3
    out, _ = through(codec_named("TOPK(64/4096,INT8)"), values)
    assert not out[:CHUNK].any()
    assert np.allclose(out[CHUNK : CHUNK + 64], 3, rtol=0.01) and not out[CHUNK + 64 :].any()


def test_all_kept_in_full_precision_is_lossless():
    values = np.random.default_rng(0).standard_normal(CHUNK + 77, dtype=np.float32)
    assert np.array_equal(through(codec_named("TOPK(4096/4096,F32)"), values)[0], values)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4095), max_size=33))
def test_indices_take_twelve_bits_each(indices):
    packed = np.zeros(-(-len(indices) * 3 // 2), np.uint8)
    pack_twelve(np.array(indices, np.intp), packed)
    joined = sum(index << (12 * place) for place, index in enumerate(indices))
    assert packed.tobytes() == joined.to_bytes(packed.size, "little")
    assert unpack_twelve(packed, len(indices)).tolist() == indices


def test_hostile_indices_cannot_write_outside_the_fragment():
    codec = codec_named("TOPK(4/4096,F32)")
    parts = [np.full(part.nbytes, 0xFF, np.uint8) for part in codec.parts(10)]
    parts[2].view(np.float32)[:] = 1
    guarded = np.zeros(12, np.float32)
    codec.decode(parts, 0, 10, guarded[1:11])
    assert not guarded.any()


@pytest.mark.parametrize("kept", [0, 2, 5, 4100])
def test_counts_that_would_leave_codes_between_bytes_are_refused(kept):
    with pytest.raises(ConfigurationError, match="multiple of 4"):
        codec_named(f"TOPK({kept}/4096,INT2)")
