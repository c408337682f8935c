"""Where a round's contributions wait for their merge: in memory up to a budget, beyond it on disk.

Only compact bytes are kept, as they came from the store. Beyond the budget they go to an unnamed temporary
file, which the operating system removes with the last handle however the process ends, and are mapped back: a
merge reads them where they lie, and the page cache holds what memory allows. Reading them into buffers costs a
merge half as much time again. The map lives as long as anyone holds what :meth:`Spool.kept` returned, so a
merge that is still running when its round is given up reads what it began with.
"""

import logging
import mmap
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from gradientmail_core.errors import ConfigurationError, GradientMailError
from gradientmail_core.tensors.encoded import Encoded, InMemory
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.parts import Bytes

logger = logging.getLogger("gradientmail")


class SpoolFailed(GradientMailError):
    """What was spooled to disk is no longer there."""


class Spool:
    """Contributions of one round. ``budget`` is in bytes; nothing is spooled until they exceed it together.

    Not for use from several threads at once; what :meth:`kept` returns is.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ConfigurationError(f"A memory budget of {budget} bytes.", "Use zero or more.")
        self._room = budget
        self.spooled = 0
        """Bytes on disk."""
        self._told = False

    def kept(self, held: InMemory) -> Encoded:
        """The contribution, in memory or on disk.

        One that went to disk is copied, so the caller's bytes may be freed. Raises :class:`OSError` when the disk
        is full.
        """
        size = sum(part.nbytes for part in held.parts)
        if size <= self._room:
            self._room -= size
            return held
        file = _mapped(held.parts)
        self.spooled += size
        borders = pairwise(accumulate((part.nbytes for part in held.parts), initial=0))
        bytes_ = np.frombuffer(file, np.uint8)
        return OnDisk(file, InMemory(held.codec, [bytes_[begin:end] for begin, end in borders]))

    def overflowed(self, error: OSError) -> None:
        """Say once, of a round whose contributions stay in memory beyond the budget, why they do."""
        if not self._told:
            self._told = True
            logger.warning(
                "a round's contributions stay in memory beyond merge_memory, because the disk cannot hold them: %s. "
                "Free some space where TMPDIR is, point it elsewhere, or raise merge_memory.",
                error.strerror or error,
            )


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A contribution in a mapped file."""

    file: mmap.mmap
    held: InMemory

    def read(self, start: int, stop: int, out: Flat) -> Flat:
        """Elements ``start`` to ``stop``, as :class:`InMemory` gives them.

        Raises :class:`SpoolFailed` if the file was cut short: touching what is gone would end the process.
        """
        size = self.file.size()
        if size < len(self.file):
            raise SpoolFailed(
                f"A spooled contribution of {len(self.file)} bytes has {size} left on disk.",
                "Point TMPDIR at a sound local disk, or raise merge_memory so that nothing is spooled.",
            )
        return self.held.read(start, stop, out)


def _mapped(parts: Sequence[Bytes]) -> mmap.mmap:
    with tempfile.TemporaryFile(prefix="gradientmail-") as file:
        for part in parts:
            file.write(part.data)
        file.flush()
        return mmap.mmap(file.fileno(), file.tell(), access=mmap.ACCESS_READ)
