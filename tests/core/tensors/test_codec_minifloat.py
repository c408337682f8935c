import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.tensors.codec_minifloat import E2M1, E3M0, E4M3, F4, F4_E3M0, F8_E4M3

FORMATS = {"F8_E4M3": (F8_E4M3, E4M3, 3, -6), "F4": (F4, E2M1, 1, 0), "F4_E3M0": (F4_E3M0, E3M0, 0, -2)}
"""Codec, format, mantissa bits, smallest normal exponent."""


def through(codec, values):
    parts = [np.zeros(part.nbytes, np.uint8) for part in codec.parts(values.size)]
    codec.encode(values, parts)
    out = np.empty(values.size, np.float32)
    codec.decode(parts, 0, values.size, out)
    return out, parts


def nearest_even(values, magnitudes):
    """By brute force, in fp64: the nearest magnitude, of two equally near the one with the even code."""
    distance = np.abs(np.abs(values.astype(np.float64))[:, None] - np.array(magnitudes)[None, :])
    codes = np.arange(len(magnitudes))
    best = np.lexsort((np.broadcast_to(codes % 2, distance.shape), distance), axis=1)[:, 0]
    return np.copysign(np.array(magnitudes)[best], values).astype(np.float32)


def test_e4m3_is_torchs_under_a_scale_of_one():
    patterns = np.arange(2**16, dtype=np.uint32) << 16
    values = np.concatenate([patterns, patterns | 1, patterns | 0x8000, patterns | 0xFFFF]).view(np.float32)
    values = values[np.abs(values) <= 448]
    groups = np.full((-(-values.size // 255), 256), 448, np.float32)
    groups[:, 1:].reshape(-1)[: values.size] = np.resize(values, groups[:, 1:].size)[: values.size]
    flat = groups.reshape(-1)
    out, (scales, codes) = through(F8_E4M3, flat)
    expected = torch.from_numpy(flat).to(torch.float8_e4m3fn)
    assert (scales == 127).all()
    assert np.array_equal(codes, expected.view(torch.uint8).numpy())
    assert np.array_equal(out, expected.float().numpy())


@pytest.mark.parametrize("name", FORMATS)
def test_each_magnitude_comes_back_exactly_under_any_scale(name):
    codec, format, _, _ = FORMATS[name]
    for exponent in (-100, -3, 0, 60):
        values = np.zeros(codec.group, np.float32)
        listed = np.array(format.magnitudes, np.float32)[-codec.group :] * np.float32(2.0**exponent)
        values[: listed.size] = -listed
        assert np.array_equal(through(codec, values)[0], values)


@pytest.mark.parametrize("name", ["F4", "F4_E3M0"])
@settings(max_examples=50, deadline=None)
@given(eighths=st.lists(st.integers(-8 * 8, 8 * 8), min_size=1, max_size=31), nudge=st.sampled_from([0, 1e-6, -1e-6]))
def test_rounding_is_to_nearest_and_ties_to_even(name, eighths, nudge):
    codec, format, _, _ = FORMATS[name]
    top = format.magnitudes[-1]
    values = np.array([top, *(eighth / 64 * top * (1 + nudge) for eighth in eighths)], np.float32)
    out, (scales, _) = through(codec, values)
    assert scales[0] == 127
    assert np.array_equal(out, nearest_even(values, format.magnitudes))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**20), size=st.integers(1, 700), exponent=st.integers(-30, 37), spread=st.integers(0, 8))
def test_the_error_is_within_the_documented_bound(name, seed, size, exponent, spread):
    codec, format, mantissa, lowest = FORMATS[name]
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(size) * 10.0 ** (exponent - rng.integers(0, spread + 1, size))).astype(np.float32)
    values = np.clip(values, -2.5e38, 2.5e38)
    out, (scales, _) = through(codec, values)
    scale = np.repeat(2.0 ** (scales.astype(np.float64) - 127), codec.group)[:size]
    bound = np.maximum(np.abs(values) * 2.0 ** -(mantissa + 1), scale * 2.0 ** (lowest - mantissa - 1))
    assert (np.abs(out.astype(np.float64) - values) <= bound).all()
    largest = np.maximum.reduceat(np.abs(values), np.arange(0, size, codec.group))
    overflow = (format.magnitudes[-1] + format.step_up) / 2
    assert (2.0 ** (scales.astype(np.float64) - 127) <= np.maximum(largest * 2 / overflow, 2.0**-126)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_values_over_the_range_saturate_and_never_become_infinite(name):
    codec = FORMATS[name][0]
    values = np.array([np.finfo(np.float32).max, 3e38, -3e38, 1.0], np.float32)
    out, _ = through(codec, values)
    assert np.isfinite(out).all()
    assert (np.abs(out[:3]) >= 1.7e38).all() and np.sign(out[2]) == -1


def test_a_stray_nan_code_decodes_as_nan():
    out = np.empty(2, np.float32)
    F8_E4M3.decode([np.array([127], np.uint8), np.array([0x7F, 0xFF], np.uint8)], 0, 2, out)
    assert np.isnan(out).all()
