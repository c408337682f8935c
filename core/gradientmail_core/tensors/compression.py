"""Lossless compression of payloads: zstd over byte planes, many small frames on a few threads.

Floats of one tensor share few exponents, so their upper bytes compress well and their lower bytes not at
all. Each chunk of 1 Mi elements is taken apart into byte planes, and each plane becomes one standard
zstd frame. The parameters lean on Huffman coding: matches of seven bytes or more only, from a hash
table of 64 entries. On a plane of exponents that is both smaller and three times faster than level 1.

Container (numbers little-endian), a sequence of frames that any zstd decoder accepts:

    skippable frame   magic 0x184D2A5A (4), content size (4), then the content:
                      "gmz1" (4), element bytes w (1), zeros (3), plain size (8), size of each frame (4 each)
    per chunk         w frames: byte 0 of every element, byte 1, ...
    one frame         the bytes after the last whole element, if any

The plain bytes are a whole payload file, header included: a header is padded to 64 bytes, so the elements
behind it stay aligned. Digests elsewhere are always of the plain bytes. A reader knows from ``w`` and the
plain size which frames there must be and how long each becomes; it compares that with its limit and
with what the frames declare before it allocates, so a few bytes cannot make it reserve many.
"""

import itertools
import struct
import threading
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.kernels import BLOCK, for_each, scratch
from gradientmail_core.tensors.parts import ELEMENT_BYTES, Bytes, Codec
from gradientmail_core.tensors.payload import Body, Malformed

CHUNK = 2**20
MAGIC = 0x184D2A5A
TAG = b"gmz1"
HEAD = struct.Struct("<II4sB3xQ")
Words: TypeAlias = NDArray[np.generic]

WORDS: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Element widths that are taken apart, and the whole numbers they are read as."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What compressing gains and costs: compressed over plain size, and plain bytes per second each way."""

    ratio: float = 0.68
    compress: float = 2.0e9
    decompress: float = 3.4e9

    @property
    def break_even(self) -> float:
        """Bytes per second of a link over which plain bytes are as fast, all steps one after another."""
        return (1 - self.ratio) / (1 / self.compress + 1 / self.decompress)


BF16_DELTAS = Speeds()
"""Measured on bfloat16 deltas with two threads; about 400 MB/s break even."""


def worth_compressing(link_bytes_per_s: float | None, speeds: Speeds = BF16_DELTAS) -> bool:
    """Whether compress, send, decompress takes less time than sending plain; an unknown link counts as slow."""
    return link_bytes_per_s is None or link_bytes_per_s < speeds.break_even


def element_bytes(codec: Codec) -> int:
    """Width of the elements in a payload of ``codec``: 1 where codes or scales of several kinds follow each other."""
    return ELEMENT_BYTES[codec.parts(1)[0].dtype] if codec.elementwise else 1


def is_compressed(body: Body) -> bool:
    """True if ``body`` starts as :func:`compress` starts; no payload file can."""
    start = bytes(memoryview(body)[: HEAD.size])
    return len(start) == HEAD.size and HEAD.unpack(start)[0] == MAGIC and HEAD.unpack(start)[2] == TAG


def compress(body: Body, element_bytes: int) -> memoryview:
    """The container of ``body``, whose elements are ``element_bytes`` wide (1, 2 or 4).

    Raises :class:`ConfigurationError` for another width.
    """
    if element_bytes not in WORDS:
        raise ConfigurationError(f"Elements of {element_bytes} bytes cannot be compressed.", "Use 1, 2 or 4.")
    plain = np.frombuffer(body, np.uint8)
    chunks = _chunks(plain.size, element_bytes)
    room = element_bytes * _frame_bytes_max(CHUNK)
    staged = np.empty(room * len(chunks), np.uint8)
    frames: list[list[Bytes]] = [[] for _ in chunks]

    def one(index: int) -> None:
        start, elements, width = chunks[index]
        words = plain[start : start + elements * width].view(WORDS[width])
        free = staged[index * room : (index + 1) * room]
        for byte in range(width):
            used = _compress_into(_plane(words, byte), free)
            frames[index].append(free[:used])
            free = free[used:]

    for_each(len(chunks), one)
    return _joined(element_bytes, plain.size, [frame for planes in frames for frame in planes])


def opened(body: Body, limit: int) -> Body | Malformed:
    """The plain bytes of a body that may be compressed; those of a compressed one are at most ``limit``."""
    return decompress(body, limit) if is_compressed(body) else body


def decompress(body: Body, limit: int) -> memoryview | Malformed:
    """The plain bytes, if they are at most ``limit``; nothing is allocated for more."""
    view = memoryview(body).cast("B")
    if not is_compressed(view):
        return Malformed("it is not in this library's compressed form")
    _, content, _, width, size = HEAD.unpack_from(view)
    if size > limit:
        return Malformed(f"{size} plain bytes where at most {limit} are allowed")
    if width not in WORDS:
        return Malformed(f"elements of {width} bytes")
    chunks = _chunks(size, width)
    count = sum(chunk[2] for chunk in chunks)
    if content != HEAD.size - 8 + 4 * count or HEAD.size + 4 * count > view.nbytes:
        return Malformed("the index has another length than the plain size gives it")
    borders = HEAD.size + 4 * count + np.cumsum([0, *np.frombuffer(view, "<u4", count, HEAD.size).tolist()])
    if borders[-1] != view.nbytes:
        return Malformed("the frames have another length than the index gives them")
    frames = [view[begin:end] for begin, end in itertools.pairwise(borders)]
    return _restored(frames, chunks, size)


def _restored(frames: list[memoryview], chunks: list[tuple[int, int, int]], size: int) -> memoryview | Malformed:
    before = [0, *np.cumsum([chunk[2] for chunk in chunks]).tolist()]
    for index, (_, elements, width) in enumerate(chunks):
        for frame in frames[before[index] : before[index] + width]:
            if _declared_size(frame) != elements:
                return Malformed("a frame declares another size than its plane has, or none")
    plain = np.empty(size, np.uint8)

    def one(index: int) -> None:
        start, elements, width = chunks[index]
        words = plain[start : start + elements * width]
        if width == 1:
            _plain_plane(frames[before[index]], elements, words)
            return
        planes = scratch("planes", width * elements, np.uint8).reshape(width, elements)
        for plane, frame in zip(planes, frames[before[index] : before[index] + width], strict=True):
            _plain_plane(frame, elements, plane)
        _interleave(planes, words.view(WORDS[width]))

    try:
        for_each(len(chunks), one)
    except zstandard.ZstdError as problem:
        return Malformed(f"a frame is damaged: {problem!s:.100}")
    return plain.data


def _joined(width: int, size: int, frames: list[Bytes]) -> memoryview:
    """The container of these frames."""
    sizes = np.array([frame.size for frame in frames], "<u4").tobytes()
    head = HEAD.pack(MAGIC, HEAD.size - 8 + len(sizes), TAG, width, size) + sizes
    borders = list(itertools.accumulate((frame.size for frame in frames), initial=len(head)))
    joined = np.empty(borders[-1], np.uint8)
    joined[: len(head)] = np.frombuffer(head, np.uint8)

    def one(index: int) -> None:
        joined[borders[index] : borders[index + 1]] = frames[index]

    for_each(len(frames), one)
    return joined.data


class _Tools(threading.local):
    """zstd contexts, which serve one thread each."""

    def __init__(self) -> None:
        huffman = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, chain_log=6)
        self.compressor = zstandard.ZstdCompressor(compression_params=huffman)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=2 * CHUNK)


_tools = _Tools()


def _chunks(size: int, width: int) -> list[tuple[int, int, int]]:
    """(first byte, elements, bytes of an element) of each chunk; bytes after the last whole element stand alone."""
    whole = size // width
    chunks = [(first * width, min(CHUNK, whole - first), width) for first in range(0, whole, CHUNK)]
    return chunks + ([(whole * width, size - whole * width, 1)] if size > whole * width else [])


def _plane(words: Words, byte: int) -> Bytes:
    """That byte of every word; shifting whole words keeps to vector instructions where a strided copy does not."""
    if words.dtype == np.uint8:
        return words.view(np.uint8)
    plane = scratch("plane", words.size, np.uint8)
    for start in range(0, words.size, BLOCK):
        block = words[start : start + BLOCK]
        shifted = scratch("shifted", block.size, words.dtype.type)
        np.copyto(plane[start : start + BLOCK], np.right_shift(block, 8 * byte, out=shifted), casting="unsafe")
    return plane


def _interleave(planes: Bytes, words: Words) -> None:
    """The inverse of :func:`_plane` for all planes."""
    for start in range(0, words.size, BLOCK):
        block = words[start : start + BLOCK]
        shifted = scratch("shifted", block.size, words.dtype.type)
        np.copyto(block, planes[0][start : start + BLOCK])
        for byte, plane in enumerate(planes[1:], 1):
            np.copyto(shifted, plane[start : start + BLOCK])
            np.left_shift(shifted, 8 * byte, out=shifted)
            np.bitwise_or(block, shifted, out=block)


def _declared_size(frame: memoryview) -> int:
    """Content size in a frame's header; -1 if it is no frame, or does not say."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError:
        return -1
    return -1 if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) else int(size)


def _frame_bytes_max(size: int) -> int:
    """Most bytes of a frame of ``size`` plain bytes: stored, with a header for every block of 128 KiB, and slack."""
    return size + size // 256 + 512


def _compress_into(plane: Bytes, free: Bytes) -> int:
    """Write the plane's frame to the start of ``free``; gives its length.

    Reading into memory at hand takes half the time of new bytes objects, which cost their page faults.
    """
    return int(_tools.compressor.stream_reader(plane.data, size=plane.size).readinto(free.data))


def _plain_plane(frame: memoryview, size: int, out: Bytes) -> None:
    """The frame's ``size`` plain bytes in ``out``; raises :class:`zstandard.ZstdError` if there are fewer or more."""
    if _tools.decompressor.stream_reader(frame).readinto(out.data) != size:
        raise zstandard.ZstdError("another size than declared")
