"""How much private memory a process held at most, looked up while it works (Linux)."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY_SECONDS = 0.003


class Watch:
    """The most private memory this process held while it was open, in bytes."""

    def __init__(self) -> None:
        self.most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._done.wait(EVERY_SECONDS):
            self.most = max(self.most, private_bytes())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()


def private_bytes() -> int:
    """Anonymous memory of this process: what it allocated, without files that it mapped."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0
