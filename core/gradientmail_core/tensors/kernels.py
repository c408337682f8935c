"""Flat fp32 arithmetic at the speed of memory: cache-sized blocks, output arrays, a few shared threads.

A block (:data:`BLOCK` elements, 256 KiB of fp32) stays in a core's cache while several passes go over
it, and numpy releases the interpreter lock inside each pass, so threads scale. Results are the same
bytes on any CPU and for any thread count: block borders are fixed multiples of ``BLOCK``, passes are
elementwise (add, subtract, multiply, copy), and sums are fp64 ``add.reduce`` of a block, the blocks
added in their order. BLAS and transcendental functions, which differ between CPUs, are not used.

``GRADIENTMAIL_THREADS`` sets the number of threads; the default is the CPUs this process may use, at
most eight, since a few saturate memory.
"""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors.model import Flat

S = TypeVar("S", bound=np.generic)

BLOCK = 65536
"""Elements of a block: the unit of cache use, of threading, and of partial decoding."""

SPAN = 4 * BLOCK
"""Elements of a span: what a thread works through at once where several arrays are read and written in turn.

Its arrays are more than a core's own cache holds, and still faster than a block's: longer runs keep the
hardware's prefetching busy, and the interpreter's lock changes hands less often.
"""

THREADS_MOST = 8
INLINE_BLOCKS = 2


def thread_count() -> int:
    """Threads that share one call's work, the caller's included."""
    asked = os.environ.get("GRADIENTMAIL_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return min(usable, THREADS_MOST)


class _Pool:
    """The process's worker threads, made at first use and again after a fork."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.executor: ThreadPoolExecutor | None = None

    def get(self) -> ThreadPoolExecutor:
        with self.lock:
            if self.executor is None:
                self.executor = ThreadPoolExecutor(max(thread_count() - 1, 1), thread_name_prefix="gradientmail-kernel")
            return self.executor


class _Lane(threading.local):
    """What belongs to one thread: whether it is inside a shared call, and its scratch buffers."""

    def __init__(self) -> None:
        self.busy = False
        self.buffers: dict[str, NDArray[np.uint8]] = {}


_pool = _Pool()
_lane = _Lane()


def _forget_threads() -> None:
    """A forked child has none of its parent's threads."""
    _pool.lock, _pool.executor = threading.Lock(), None
    _lane.busy = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def for_each(count: int, work: Callable[[int], None], inline: int = 1) -> None:
    """Call ``work(i)`` for every ``i`` in ``range(count)``, each once, on the shared threads.

    At most ``inline`` items, and calls made from inside ``work``, run on the calling thread. The first
    exception of ``work`` is raised once no thread works on this call any more.
    """
    lanes = 1 if count <= inline or _lane.busy else min(thread_count(), count)
    if lanes <= 1:
        for index in range(count):
            work(index)
        return
    indices = itertools.count()

    def drain() -> None:
        _lane.busy = True
        try:
            while (index := next(indices)) < count:
                work(index)
        finally:
            _lane.busy = False

    helpers = [_pool.get().submit(drain) for _ in range(lanes - 1)]
    try:
        drain()
    finally:
        waited = [helper for helper in helpers if not helper.cancel()]
        failures = [failure for helper in waited if (failure := helper.exception()) is not None]
    if failures:
        raise failures[0]


def for_blocks(size: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(start, stop)`` for every block of ``size`` elements; ``start`` is a multiple of BLOCK.

    Blocks are disjoint and cover ``range(size)``; ``work`` runs on several threads at once.
    """
    for_each(-(-size // BLOCK), lambda index: work(index * BLOCK, min((index + 1) * BLOCK, size)), INLINE_BLOCKS)


def for_spans(size: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(start, stop)`` for every span of ``size`` elements, as :func:`for_blocks` does for blocks."""
    for_each(-(-size // SPAN), lambda index: work(index * SPAN, min((index + 1) * SPAN, size)))


def sum_blocks(size: int, work: Callable[[int, int], float]) -> float:
    """The sum of ``work(start, stop)`` over the blocks, added in the order of the blocks."""
    sums = [0.0] * -(-size // BLOCK)

    def one(start: int, stop: int) -> None:
        sums[start // BLOCK] = work(start, stop)

    for_blocks(size, one)
    total = 0.0
    for value in sums:
        total += value
    return total


def scratch(name: str, count: int, dtype: type[S]) -> NDArray[S]:
    """An uninitialised array of ``count`` elements, this thread's until it asks for ``name`` again.

    Fresh arrays of block size cost more in page faults than the arithmetic on them.
    """
    needed = count * np.dtype(dtype).itemsize
    held = _lane.buffers.get(name)
    if held is None or held.nbytes < needed:
        held = _lane.buffers[name] = np.empty(needed, np.uint8)
    return held[:needed].view(dtype)


def subtract(a: Flat, b: Flat, out: Flat) -> None:
    """``out = a - b``; ``out`` may be ``a`` or ``b``."""
    for_blocks(out.size, lambda i, j: _discard(np.subtract(a[i:j], b[i:j], out=out[i:j])))


def add(a: Flat, b: Flat, out: Flat) -> None:
    """``out = a + b``; ``out`` may be ``a`` or ``b``."""
    for_blocks(out.size, lambda i, j: _discard(np.add(a[i:j], b[i:j], out=out[i:j])))


def copy(src: Flat, out: Flat) -> None:
    """``out = src``."""
    for_blocks(out.size, lambda i, j: np.copyto(out[i:j], src[i:j]))


def is_finite(values: Flat) -> bool:
    """True if no value is infinite or NaN."""
    bad = [False]

    def check(start: int, stop: int) -> None:
        if not bad[0]:
            finite = scratch("is_finite", stop - start, np.bool_)
            if not np.isfinite(values[start:stop], out=finite).all():
                bad[0] = True

    for_blocks(values.size, check)
    return not bad[0]


def sum_of_squares(values: Flat) -> float:
    """The sum of squares in fp64: each square exact, ``add.reduce`` per block, blocks in order."""

    def one(start: int, stop: int) -> float:
        squares = scratch("squares", stop - start, np.float64)
        np.copyto(squares, values[start:stop])
        return float(np.add.reduce(np.multiply(squares, squares, out=squares)))

    return sum_blocks(values.size, one)


def dot_in_blocks(a: Flat, b: Flat) -> float:
    """The inner product in fp64: each product exact, ``add.reduce`` per block, blocks in order."""

    def one(start: int, stop: int) -> float:
        left, right = scratch("left", stop - start, np.float64), scratch("right", stop - start, np.float64)
        np.copyto(left, a[start:stop])
        np.copyto(right, b[start:stop])
        return float(np.add.reduce(np.multiply(left, right, out=left)))

    return sum_blocks(a.size, one)


def _discard(_: object) -> None:
    """Turn an expression into a statement for a lambda."""
