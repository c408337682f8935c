import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradientmail_core.tensors.codecs import BF16, F16, F32
from gradientmail_core.tensors.kernels import BLOCK

TORCH = {"F16": (F16(), torch.float16), "BF16": (BF16(), torch.bfloat16)}
bits = st.integers(0, 2**32 - 1)


def encoded(codec, values):
    out = [np.zeros(part.nbytes, np.uint8) for part in codec.parts(values.size)]
    codec.encode(values, out)
    return out


def decoded(codec, parts, start, stop):
    out = np.full(stop - start, 7, np.float32)
    codec.decode(parts, start, stop, out)
    return out


@settings(max_examples=60, deadline=None)
@given(arrays(np.uint32, st.integers(0, 40), elements=bits))
def test_f32_keeps_every_bit(patterns):
    values = patterns.view(np.float32)
    assert np.array_equal(decoded(F32(), encoded(F32(), values), 0, values.size).view(np.uint32), patterns)


@pytest.mark.parametrize("name", TORCH)
@settings(max_examples=100, deadline=None)
@given(patterns=arrays(np.uint32, st.integers(0, 40), elements=bits))
def test_rounding_is_torchs_for_every_bit_pattern(name, patterns):
    codec, dtype = TORCH[name]
    values = patterns.view(np.float32)
    expected = torch.from_numpy(values.copy()).to(dtype).to(torch.float32).numpy()
    got = decoded(codec, encoded(codec, values), 0, values.size)
    assert np.array_equal(got, expected, equal_nan=True)


@pytest.mark.parametrize("name", TORCH)
def test_rounding_is_torchs_on_ties_and_at_the_ends_of_the_range(name):
    codec, dtype = TORCH[name]
    high = np.arange(2**16, dtype=np.uint32) << 16
    values = np.concatenate([high, high | 0x7FFF, high | 0x8000, high | 0x8001, high | 0x1000, high | 0x3000]).view(
        np.float32
    )
    expected = torch.from_numpy(values.copy()).to(dtype).to(torch.float32).numpy()
    got = decoded(codec, encoded(codec, values), 0, values.size)
    assert np.array_equal(got, expected, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(values))


@pytest.mark.parametrize("codec", [F32(), F16(), BF16()], ids=lambda codec: codec.name)
def test_any_aligned_range_decodes_alone(codec):
    size = 3 * BLOCK + 17
    values = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    parts = encoded(codec, values)
    whole = decoded(codec, parts, 0, size)
    for start, stop in [(0, 0), (0, 5), (BLOCK, 2 * BLOCK), (BLOCK, BLOCK + 9), (2 * BLOCK, size), (3 * BLOCK, size)]:
        assert np.array_equal(decoded(codec, parts, start, stop), whole[start:stop])
