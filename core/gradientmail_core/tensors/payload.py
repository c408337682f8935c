"""Payloads: one encoded fragment as a safetensors file, written to a known size and compared on arrival.

The header (names, dtypes, shapes, offsets) follows from layout and codec, so a reader knows every
number in it beforehand: :func:`parse_payload` bounds the header before reading it, and refuses a body
that differs in anything but its ``__metadata__`` strings. Nothing is allocated from a number that a
stranger wrote, and a malformed body is a :class:`Malformed` value, never an exception.

Elementwise codecs show each piece of the layout as a tensor of its own name and shape; the others show
their parts as flat tensors. Either way stock safetensors reads the file. The header is padded with
spaces so that the data starts at a multiple of 64 bytes.

``sha256`` is that of the data section, uncompressed: it names the values and not their description.
"""

import hashlib
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.parts import ELEMENT_BYTES, Bytes, Codec
from gradientmail_core.tensors.schema import FragmentLayout

Body: TypeAlias = bytes | bytearray | memoryview

METADATA_BYTES_MAX = 2**20
HEADER_BYTES_MAX = 16 * 2**20
ALIGNMENT = 64
UNKNOWN_DIGEST = "0" * 64
SURROGATE = re.compile("[\ud800-\udfff]")

NUMPY_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""safetensors dtype of each numpy dtype that :func:`encode_tensors` writes."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A well-formed payload: its metadata, the raw bytes of each codec part, and the digest of its data.

    ``parts`` are views into the body that was parsed.
    """

    metadata: Mapping[str, str]
    parts: tuple[Bytes, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """A body that is not the payload expected, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a header: ``begin`` and ``end`` are bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def described(self) -> dict[str, object]:
        """The entry as safetensors spells it."""
        return {"dtype": self.dtype, "shape": list(self.shape), "data_offsets": [self.begin, self.end]}


def entries(layout: FragmentLayout, codec: Codec) -> tuple[Entry, ...]:
    """The tensors of a payload of ``layout`` in ``codec``, back to back from byte 0."""
    parts = codec.parts(layout.size)
    if codec.elementwise:
        named = [(piece.key, parts[0].dtype, piece.shape) for piece in layout.pieces]
    else:
        named = [(part.name, part.dtype, (part.count,)) for part in parts]
    return tuple(_placed(named))


def encode_payload(
    layout: FragmentLayout, codec: Codec, values: Flat, describe: Callable[[str], Mapping[str, str]]
) -> bytearray:
    """A complete safetensors file of the fragment's ``values`` (fp32, ``layout.size`` elements).

    ``describe`` gives the metadata from the sha256 of the data section; it is called first with a
    placeholder of 64 zeros, and both results must take the same room. Raises
    :class:`ConfigurationError` if they do not, or if the sizes do not fit the layout.
    """
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    if flat.size != layout.size:
        raise ConfigurationError(f"A fragment of {layout.size} elements was given {flat.size} values.")
    listed = entries(layout, codec)
    room = len(_header(listed, describe(UNKNOWN_DIGEST)))
    body = bytearray(room + _data_bytes(listed))
    codec.encode(flat, _part_views(memoryview(body)[room:], codec, layout.size))
    header = _header(listed, describe(hashlib.sha256(memoryview(body)[room:]).hexdigest()))
    if len(header) != room:
        raise ConfigurationError(
            "The payload's metadata changes size with its digest.", "Keep every field's width fixed."
        )
    body[:room] = header
    return body


def parse_payload(body: Body, layout: FragmentLayout, codec: Codec) -> Payload | Malformed:
    """The payload in ``body`` if it is one of ``layout`` in ``codec``, byte count included."""
    listed = entries(layout, codec)
    header = _read_header(body, header_bytes_max(listed))
    if isinstance(header, Malformed):
        return header
    tensors, metadata, data_start = header
    data = memoryview(body)[data_start:]
    if data.nbytes != _data_bytes(listed):
        return Malformed(f"{data.nbytes} bytes of data where the layout has {_data_bytes(listed)}")
    wanted = {entry.name: entry.described() for entry in listed}
    if tensors.keys() != wanted.keys():
        return Malformed("it holds other tensors than the layout")
    for name, tensor in tensors.items():
        if not _same(tensor, wanted[name]):
            return Malformed(f"tensor {name[:200]!r} has another dtype, shape or place than the layout gives it")
    return Payload(metadata, tuple(_part_views(data, codec, layout.size)), hashlib.sha256(data).hexdigest())


def data_parts(body: Body, layout: FragmentLayout, codec: Codec) -> list[Bytes]:
    """The raw bytes of each part of ``codec`` in a payload that :func:`encode_payload` made, as views."""
    view = memoryview(body)
    return _part_views(view[view.nbytes - _data_bytes(entries(layout, codec)) :], codec, layout.size)


def read_metadata(body: Body) -> Mapping[str, str] | Malformed:
    """The ``__metadata__`` strings of a safetensors file, without a look at its tensors."""
    header = _read_header(body, HEADER_BYTES_MAX)
    return header if isinstance(header, Malformed) else header[1]


def is_whole(body: Body) -> bool:
    """Whether ``body`` is a safetensors file with all its data, of whatever tensors."""
    header = _read_header(body, HEADER_BYTES_MAX)
    if isinstance(header, Malformed):
        return False
    tensors, _, start = header
    ends = [tensor.get("data_offsets") if isinstance(tensor, dict) else None for tensor in tensors.values()]
    numbers = [end[1] for end in ends if isinstance(end, list) and len(end) == 2 and type(end[1]) is int]
    return len(numbers) == len(tensors) and max(numbers, default=0) == memoryview(body).nbytes - start


def header_bytes_max(listed: Sequence[Entry]) -> int:
    """Most bytes an acceptable header takes, its length field included."""
    return len(_header(listed, {})) + METADATA_BYTES_MAX


def payload_bytes_max(layout: FragmentLayout, codec: Codec) -> int:
    """Most bytes an acceptable payload takes."""
    listed = entries(layout, codec)
    return header_bytes_max(listed) + _data_bytes(listed)


def encode_tensors(arrays: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str]) -> bytearray:
    """A safetensors file of numpy arrays (the dtypes in :data:`NUMPY_DTYPES`), in the mapping's order.

    Raises :class:`ConfigurationError` for another dtype.
    """
    for name, array in arrays.items():
        if array.dtype.name not in NUMPY_DTYPES:
            raise ConfigurationError(f"Tensor {name!r} has dtype {array.dtype.name}.", "Convert it to float32 first.")
    listed = tuple(_placed([(name, NUMPY_DTYPES[a.dtype.name], a.shape) for name, a in arrays.items()], arrays))
    header = _header(listed, metadata)
    body = bytearray(len(header) + _data_bytes(listed))
    body[: len(header)] = header
    data = np.frombuffer(memoryview(body)[len(header) :], np.uint8)
    for entry, array in zip(listed, arrays.values(), strict=True):
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        data[entry.begin : entry.end] = little.reshape(-1).view(np.uint8)
    return body


def _placed(
    named: Sequence[tuple[str, str, tuple[int, ...]]], arrays: Mapping[str, NDArray[np.generic]] | None = None
) -> Iterator[Entry]:
    begin = 0
    for name, dtype, shape in named:
        width = ELEMENT_BYTES[dtype] if arrays is None else arrays[name].dtype.itemsize
        end = begin + width * math.prod(shape)
        yield Entry(name, dtype, shape, begin, end)
        begin = end


def _data_bytes(listed: Sequence[Entry]) -> int:
    return listed[-1].end if listed else 0


def _header(listed: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """The length field and the padded JSON."""
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    fields.update((entry.name, entry.described()) for entry in listed)
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _part_views(data: memoryview, codec: Codec, size: int) -> list[Bytes]:
    """The raw bytes of each part of ``codec``, which lie back to back in ``data``."""
    flat = np.frombuffer(data, np.uint8)
    borders = itertools.accumulate((part.nbytes for part in codec.parts(size)), initial=0)
    return [flat[begin:end] for begin, end in itertools.pairwise(borders)]


class _Refused(Exception):
    """Raised inside the JSON decoder for what JSON allows and a header must not hold."""


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _Refused("a name occurs twice")
    return fields


def _no_constant(name: str) -> object:
    raise _Refused(f"{name} is no JSON number")


def _read_header(body: Body, header_max: int) -> tuple[dict[str, object], dict[str, str], int] | Malformed:
    """Tensors by name, metadata, and where the data starts."""
    view = memoryview(body).cast("B")
    if view.nbytes < 8:
        return Malformed("shorter than a header's length field")
    end = 8 + int(struct.unpack_from("<Q", view)[0])
    if end > min(view.nbytes, header_max):
        return Malformed("the header is longer than it may be")
    try:
        fields = json.loads(bytes(view[8:end]).decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (_Refused, ValueError, RecursionError) as problem:
        return Malformed(f"the header is no JSON: {problem!s:.200}")
    if not isinstance(fields, dict):
        return Malformed("the header is no object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(map(_is_text, (*metadata, *metadata.values()))):
        return Malformed("the metadata are not strings")
    return fields, metadata, end


def _same(tensor: object, wanted: Mapping[str, object]) -> bool:
    """Equal in value and type: JSON's ``1`` and ``1.0`` and ``true`` are three different things here."""
    return (
        isinstance(tensor, dict)
        and tensor == wanted
        and all(type(number) is int for number in (*tensor["shape"], *tensor["data_offsets"]))
    )


def _is_text(value: object) -> bool:
    """A string without lone surrogates, which JSON can spell and UTF-8 cannot."""
    return isinstance(value, str) and not SURROGATE.search(value)
