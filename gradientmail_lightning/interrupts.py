"""A SIGTERM during a wait for other nodes ends the wait.

Lightning notes a SIGTERM and stops after the batch; a session that waits for a round keeps the batch from
ending, for as long as other nodes take. So while a session works, the signal also breaks a wait off, as
Ctrl-C does. Only a wait: what is being copied into the model is copied to its end.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible_waits() -> Iterator[None]:
    """Within this, SIGTERM raises ``SystemExit(143)`` if the main thread is waiting for another thread.

    The handler installed before is called first, and is back in place afterwards. Does nothing on other
    threads than the main one, where Python allows no handlers, and where the signal is ignored.
    """
    previous = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or previous in (None, signal.SIG_IGN):
        yield
        return

    def end_wait(number: int, frame: FrameType | None) -> None:
        if callable(previous):
            previous(number, frame)
        if not callable(previous) or _waits(frame):
            raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end_wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _waits(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename == threading.__file__
