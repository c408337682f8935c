"""Large arrays whose memory serves again once nobody holds them.

Each round makes new parameters and a new outer state, as large as the fragment, while those of the version before go
out of use. An allocator gives memory of that size back to the operating system at once and takes it anew, zeroed page
by page, a round later: that costs a closer as much time as its arithmetic, on some virtual machines several times as
much. So the memory of a few arrays is kept, and the next round's are made of it.

Nothing that somebody still reads is ever written: an array from :func:`empty`, and every view of one (slices, other
shapes or types, a framework's tensors over it), holds a loan of its memory, and the loan's end, when the last of them
is gone, is the only way back. What is kept meanwhile is what the next closing takes first, so the most a process
holds does not grow.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors.model import Flat

KEPT_MOST = 2
"""Arrays kept at most: what closing a round with momentum takes."""

BYTES_LEAST = 2**22
"""Smaller arrays come from the allocator, which keeps memory of their size itself."""

Memory = NDArray[np.uint8]


class Kept:
    """Memory that waits for its next use; safe for use from several threads, and from a collector's at any moment."""

    def __init__(self, most: int = KEPT_MOST) -> None:
        self._memories: deque[Memory] = deque(maxlen=most)

    def empty(self, size: int) -> Flat:
        """An uninitialised fp32 array of ``size`` elements, in kept memory if there is some of about its size."""
        if 4 * size < BYTES_LEAST:
            return np.empty(size, np.float32)
        array: Flat = np.asarray(_Loan(self._taken(4 * size), size, self._memories))
        return array

    def _taken(self, needed: int) -> Memory:
        for _ in range(len(self._memories)):
            try:
                memory = self._memories.popleft()
            except IndexError:  # another thread took it
                break
            if needed <= memory.nbytes <= 2 * needed:
                return memory
            self._memories.append(memory)
        return np.empty(_rounded(needed), np.uint8)


class _Loan:
    """Lends memory to arrays by numpy's array interface; each of them holds it, and its end gives the memory back."""

    def __init__(self, memory: Memory, size: int, home: deque[Memory]) -> None:
        self._memory, self._home = memory, home
        self.__array_interface__ = {
            "data": (memory.ctypes.data, False),
            "shape": (size,),
            "typestr": np.dtype(np.float32).str,
            "version": 3,
        }

    def __del__(self) -> None:
        self._home.append(self._memory)  # one step, without a lock: this may run inside any other call


def _rounded(needed: int) -> int:
    """``needed`` and an eighth more at most: fragments of nearly one size share memory, and unused pages are none."""
    step = 1 << max(needed.bit_length() - 4, 0)
    return -(-needed // step) * step


_kept = Kept()


def empty(size: int) -> Flat:
    """:meth:`Kept.empty` of the process's own."""
    return _kept.empty(size)
