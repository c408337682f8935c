import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.tensors.codec_groups import GroupedCodec, codes_for, look_up, pack, table_of
from gradientmail_core.tensors.codec_minifloat import E2M1
from gradientmail_core.tensors.kernels import BLOCK


@pytest.mark.parametrize("bits", [4, 2])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_packing_puts_the_earlier_code_in_the_lower_bits(bits, data):
    listed = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))
    codes = codes_for(np.empty((1, len(listed)), np.float32))
    codes[:] = listed
    packed = np.full(-(-len(listed) * bits // 8), 0xFF, np.uint8)
    pack(codes, bits, packed)
    joined = sum(code << (bits * place) for place, code in enumerate(listed))
    assert packed.tobytes() == joined.to_bytes(packed.size, "little")
    out = np.empty(len(listed), np.float32)
    look_up(table_of(range(2**bits), bits), packed, out)
    assert out.tolist() == listed


def test_a_short_last_group_has_its_own_scale_and_no_padding():
    codec = GroupedCodec("F4", E2M1, group=32)
    values = np.ones(BLOCK + 33, np.float32)
    values[-1] = 2.0**-30
    parts = [np.zeros(part.nbytes, np.uint8) for part in codec.parts(values.size)]
    codec.encode(values, parts)
    assert (len(parts[0]), len(parts[1])) == (BLOCK // 32 + 2, -(-values.size // 2))
    out = np.empty_like(values)
    codec.decode(parts, 0, values.size, out)
    assert np.array_equal(out, values)
