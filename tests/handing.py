"""A node's first life, for tests of the plugins' hand-offs: it trains until one lies in the mailbox, and is killed."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.events import HandedOff

ALONE = DiLoCo(sync_every=4, fragments=1, in_flight=1, overlap_steps=0, follow=False, quorum_size=1, delta_codec="F32")
"""One node whose run is exact, so that two lives can be held against one in bits."""

HANDED = "handed"
PATIENCE = 60.0


class Handover:
    """``heard`` is for a node's callbacks; :meth:`wait` for its trainer, until a hand-off lies in the mailbox."""

    def __init__(self) -> None:
        self._handed = threading.Event()

    def heard(self, event: Any) -> None:
        """Take note of the first hand-off."""
        if isinstance(event, HandedOff):
            self._handed.set()

    def wait(self) -> None:
        """Hold the trainer until then."""
        self._handed.wait(PATIENCE)


def await_the_end() -> None:
    """In a process of :func:`killed`: say that the hand-off is there, and train no more."""
    print(HANDED, flush=True)
    threading.Event().wait(PATIENCE)


@contextmanager
def killed(program: str) -> Iterator[None]:
    """Run ``program`` beside what the block does; afterwards kill it, once it has come to :func:`await_the_end`."""
    life = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        yield
        assert life.stdout is not None
        assert any(HANDED in line for line in life.stdout)
    finally:
        life.send_signal(signal.SIGKILL)
        life.wait()
