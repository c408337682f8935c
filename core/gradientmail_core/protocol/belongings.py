"""What a node hands on to its own next process, as bytes: arrays by name, and plain values.

The body is the length of a JSON header, the header (what arrays there are, and the plain values), and the arrays one
after the other. Nothing in it is code, and nothing is allocated that the body does not hold.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.fields import FieldRefused, Rejected, guarded, parse_object

HEADER_LONGEST = 64 * 2**20
DIMENSIONS_MOST = 32
KINDS = frozenset(
    ("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)


Array: TypeAlias = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Belongings:
    """What is handed on: arrays by name, and plain JSON values."""

    arrays: Mapping[str, Array] = field(default_factory=dict)
    plain: Mapping[str, object] = field(default_factory=dict)


def packed(belongings: Belongings) -> bytes:
    """One body: the header's length (8 bytes, little-endian), the header, the arrays one after the other.

    Raises :class:`ConfigurationError` for arrays of anything but numbers, and for values that JSON does not know.
    """
    rows, data = [], []
    for name, array in sorted(belongings.arrays.items()):
        solid = np.ascontiguousarray(array).reshape(array.shape)
        if solid.dtype.name not in KINDS:
            raise ConfigurationError(f"The array {name!r} has dtype {solid.dtype}.", "Hand on numbers only.")
        rows.append([name, solid.dtype.name, list(solid.shape)])
        data.append(solid.tobytes())
    try:
        header = json.dumps({"arrays": rows, "plain": belongings.plain}, allow_nan=False).encode()
    except (TypeError, ValueError) as problem:
        raise ConfigurationError(
            f"A value that is handed on is not plain: {problem}.", "Use what JSON has."
        ) from problem
    return b"".join([len(header).to_bytes(8, "little"), header, *data])


def unpacked(body: bytes) -> Belongings | Rejected:
    """What :func:`packed` made; why not, for anything else. Nothing is allocated that ``body`` does not hold."""
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 or length > min(len(body) - 8, HEADER_LONGEST):
        return Rejected("its header is longer than it is")
    return guarded(lambda: _unpacked(body[8 : 8 + length], memoryview(body)[8 + length :]))


def _unpacked(header: bytes, data: memoryview) -> Belongings:
    fields = parse_object(header, HEADER_LONGEST)
    arrays: dict[str, Array] = {}
    start = 0
    for row in fields.items("arrays", 10**6):
        name, dtype, shape = _row(row)
        stop = start + dtype.itemsize * int(np.prod(shape, dtype=object))
        if stop > len(data):
            raise FieldRefused("an array is longer than the body")
        arrays[name] = np.frombuffer(data[start:stop], dtype).reshape(shape).copy()
        start = stop
    if start != len(data):
        raise FieldRefused("something follows the last array")
    return Belongings(arrays, fields.mapping("plain"))


def _row(row: object) -> tuple[str, np.dtype[np.generic], tuple[int, ...]]:
    match row:
        case [str() as name, str() as kind, [*shape]] if kind in KINDS:
            sizes = tuple(size for size in shape if type(size) is int and size >= 0)
            if len(sizes) == len(shape) <= DIMENSIONS_MOST:
                return name, np.dtype(kind), sizes
    raise FieldRefused("an array is not [name, dtype, shape]")
