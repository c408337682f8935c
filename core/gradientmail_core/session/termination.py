"""A SIGTERM ends training as Ctrl-C does: the node leaves its run, and the process ends with code 143.

Python's default ends the process on the spot, and the other nodes wait for the lease to run out. The Hugging Face
Trainer, mlx-lm and a loop of one's own handle no signals unless told to. So while a session is open, or a plugin
trains, the signal raises ``SystemExit(143)`` in the main thread: ``finally`` blocks run, leaving
``with Session(...)`` by an exception aborts it, and one that was joined without ``with`` releases its lease as the
interpreter ends. A second SIGTERM ends the process at once.

A handler that somebody installed is left alone, and on other threads than the main one, where Python allows none,
nothing is done; nor by a session in a notebook, whose kernel would swallow the exception and live on.
"""

import signal
import sys
import threading
from types import FrameType
from typing import NoReturn


def end_by_exception() -> None:
    """From here on SIGTERM raises ``SystemExit(143)`` in the main thread."""
    if _on_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def end_as_before() -> None:
    """Undo :func:`end_by_exception`, unless somebody else took its place meanwhile. Safe to call twice."""
    if _on_main_thread() and signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Sessions:
    """The sessions of this process that end by SIGTERM, counted: the default is back when the last has ended."""

    def __init__(self) -> None:
        self._open = 0

    def begin(self) -> bool:
        """A session begins; True if this made SIGTERM end it in order, and :meth:`end` must follow."""
        if not _on_main_thread() or "ipykernel" in sys.modules:
            return False
        if signal.getsignal(signal.SIGTERM) is not (_leave if self._open else signal.SIG_DFL):
            return False
        end_by_exception()
        self._open += 1
        return True

    def end(self) -> None:
        """That session has ended."""
        self._open -= 1
        if not self._open:
            end_as_before()


SESSIONS = Sessions()
"""Those of this process."""


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
