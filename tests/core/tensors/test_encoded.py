"""Encoded fragments read as they decode, and plain ones without a copy."""

import numpy as np
import pytest

from gradientmail_core.tensors.codecs import NAMED, codec_named
from gradientmail_core.tensors.encoded import InMemory, holds_values
from gradientmail_core.tensors.kernels import BLOCK

SIZE = 2 * BLOCK + 4097


def encoded(name: str) -> InMemory:
    """Normal values in the bytes of a codec."""
    codec = codec_named(name)
    parts = [np.empty(part.nbytes, np.uint8) for part in codec.parts(SIZE)]
    codec.encode(np.random.default_rng(0).standard_normal(SIZE, np.float32), parts)
    return InMemory(codec, parts)


@pytest.mark.parametrize("name", [*NAMED, "TOPK(64/4096,INT2)"])
def test_a_range_reads_as_the_whole_decodes(name: str) -> None:
    held, whole = encoded(name), np.empty(SIZE, np.float32)
    held.codec.decode(held.parts, 0, SIZE, whole)
    for start, stop in ((0, SIZE), (BLOCK, 2 * BLOCK), (2 * BLOCK, SIZE)):
        assert held.read(start, stop, np.empty(stop - start, np.float32)).tobytes() == whole[start:stop].tobytes()


@pytest.mark.parametrize("name", [*NAMED, "TOPK(64/4096,INT2)"])
def test_only_plain_values_are_read_where_they_lie(name: str) -> None:
    held, out = encoded(name), np.empty(BLOCK, np.float32)
    values = held.read(BLOCK, 2 * BLOCK, out)
    assert holds_values(held.codec) == (name == "F32")
    assert np.shares_memory(values, held.parts[0]) == (name == "F32")
    assert (values is out) == (name != "F32")
