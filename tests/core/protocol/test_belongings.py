"""What is handed on comes back as it was, or is refused."""

import numpy as np
import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.belongings import Belongings, packed, unpacked
from gradientmail_core.protocol.fields import Rejected
from tests.core.protocol.belongings import same, things


def test_what_is_packed_comes_back() -> None:
    assert same(unpacked(packed(things(0.1))), things(0.1))
    assert same(unpacked(packed(Belongings())), Belongings())


@pytest.mark.parametrize("damage", [slice(0, 0), slice(0, 7), slice(0, 60), slice(0, -1)])
def test_what_is_cut_short_is_refused(damage: slice) -> None:
    assert isinstance(unpacked(packed(things(1.0))[damage]), Rejected)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b'{"arrays":[],"plain":[]}',
        b'{"arrays":[["a","float32",[999999999999]]],"plain":{}}',
        b'{"arrays":[["a","float32",[-1]]],"plain":{}}',
        b'{"arrays":[["a","object",[1]]],"plain":{}}',
        b'{"arrays":[["a","float32",[65536,65536,65536,65536,65536]]],"plain":{}}',
        b'{"arrays":[],"plain":{}}',
    ],
)
def test_a_lying_header_is_refused_and_nothing_is_allocated_for_it(header: bytes) -> None:
    assert isinstance(unpacked(len(header).to_bytes(8, "little") + header + b"1234"), Rejected)


def test_only_numbers_are_handed_on() -> None:
    with pytest.raises(ConfigurationError, match="dtype object"):
        packed(Belongings({"a": np.array([None])}))
