"""A SIGTERM ends training as Ctrl-C does, so that the node leaves the run instead of vanishing from it.

The Hugging Face Trainer and mlx-lm handle no signals unless told to, and Python's default for SIGTERM is to end the
process on the spot: the other nodes would wait for the lease to run out. A handler that somebody installed is left
alone, and on other threads than the main one, where Python allows none, nothing is done.
"""

import signal
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


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
