"""Where a round's contributions wait for their merge: in memory up to a budget, beyond it on disk.

Only compact bytes are kept, as they came from the store. Beyond the budget a body goes to an unnamed
temporary file, which the operating system removes with the last handle however the process ends, and is
mapped back: a merge reads it block by block and the page cache holds what memory allows.
"""

import contextlib
import mmap
import tempfile
from types import TracebackType
from typing import Self

from gradientmail_core.errors import ConfigurationError


class Spool:
    """Bodies of one round. ``budget`` is in bytes; nothing is spooled until the bodies exceed it together.

    Not for use from several threads at once; what :meth:`kept` returns is.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ConfigurationError(f"A memory budget of {budget} bytes.", "Use zero or more.")
        self._room = budget
        self._maps: list[mmap.mmap] = []

    @property
    def spooled(self) -> int:
        """Bytes on disk."""
        return sum(len(held) for held in self._maps)

    def kept(self, body: bytes | bytearray | memoryview) -> memoryview:
        """The body's bytes, read-only, in memory or mapped; valid until :meth:`close`.

        A body that went to disk is copied, so the caller's may be freed. Raises :class:`OSError` when the
        disk is full.
        """
        view = memoryview(body).cast("B").toreadonly()
        if len(view) <= self._room:
            self._room -= len(view)
            return view
        self._maps.append(_mapped(view))
        return memoryview(self._maps[-1])

    def close(self) -> None:
        """Free the disk. A map with views in use is freed with the last of them."""
        for held in self._maps:
            with contextlib.suppress(BufferError):
                held.close()
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _mapped(view: memoryview) -> mmap.mmap:
    with tempfile.TemporaryFile(prefix="gradientmail-") as file:
        file.write(view)
        file.flush()
        return mmap.mmap(file.fileno(), len(view), access=mmap.ACCESS_READ)
