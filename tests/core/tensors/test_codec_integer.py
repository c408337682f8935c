import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.tensors.codec_integer import INT2, INT4, INT8


def through(codec, values):
    parts = [np.zeros(part.nbytes, np.uint8) for part in codec.parts(values.size)]
    codec.encode(values, parts)
    out = np.empty(values.size, np.float32)
    codec.decode(parts, 0, values.size, out)
    return out, parts


@pytest.mark.parametrize(("codec", "largest"), [(INT8, 127), (INT4, 7)], ids=["INT8", "INT4"])
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**20), size=st.integers(1, 700), exponent=st.integers(-36, 37), spread=st.integers(0, 8))
def test_the_error_is_at_most_half_a_scale_and_the_scale_barely_more_than_needed(
    codec, largest, seed, size, exponent, spread
):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(size) * 10.0 ** (exponent - rng.integers(0, spread + 1, size))).astype(np.float32)
    out, (scales, _) = through(codec, values)
    scale = (scales.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    amax = np.maximum.reduceat(np.abs(values), np.arange(0, size, 256)).astype(np.float64)
    assert (scale <= np.maximum(amax / largest * (1 + 2**-7), 2.0**-126)).all()
    error = np.abs(out.astype(np.float64) - values)
    assert (error <= np.repeat(scale, 256)[:size] * (0.5 + 1e-4)).all()


def test_whole_multiples_of_the_scale_are_exact():
    for codec, largest in ((INT8, 127), (INT4, 7)):
        values = np.resize(np.arange(-largest, largest + 1), 256).astype(np.float32) * np.float32(2**-20)
        assert np.array_equal(through(codec, values)[0], values)


def test_halves_are_rounded_to_even():
    values = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32)
    assert through(INT8, values)[0].tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("codec", [INT8, INT4], ids=["INT8", "INT4"])
def test_the_largest_float_stays_finite(codec):
    top = np.finfo(np.float32).max
    out, _ = through(codec, np.array([top, -top, 1.0], np.float32))
    assert np.isfinite(out).all() and np.allclose(out[:2] / top, [1, -1], rtol=0.01)


def test_two_bits_carry_four_given_levels_exactly():
    levels = np.array([0.25, -0.25, 1.5, -1.5], np.float32)
    values = np.random.default_rng(0).choice(levels, 1000)
    assert np.array_equal(through(INT2, values)[0], values)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    size=st.integers(1, 700),
    exponent=st.integers(-36, 36),
    spread=st.integers(0, 8),
)
def test_two_bit_error_is_below_the_norm_of_each_group(seed, size, exponent, spread):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(size) * 10.0 ** (exponent - rng.integers(0, spread + 1, size))).astype(np.float32)
    out, _ = through(INT2, values)
    starts = np.arange(0, size, 256)
    error = np.add.reduceat((out.astype(np.float64) - values) ** 2, starts)
    total = np.add.reduceat(values.astype(np.float64) ** 2, starts)
    assert (error <= total * (1 + 2**-12) + 2.0**-250).all()


def test_two_bit_levels_are_near_the_best_for_normal_values():
    values = np.random.default_rng(0).standard_normal(2**16, dtype=np.float32)
    out, _ = through(INT2, values)
    assert np.linalg.norm(out - values) < 0.345 * np.linalg.norm(values)
