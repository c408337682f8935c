"""Closing rounds one after the other: what each took, and how much private memory the process held at most (Linux)."""

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

S = TypeVar("S")
C = TypeVar("C")

ROUNDS = 5
WARM_UP = 2
EVERY_SECONDS = 0.003
SUPPLIED_BYTES = 4 * 2**30


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


def supply_memory(amount: int = SUPPLIED_BYTES) -> None:
    """Let another process touch and free ``amount`` bytes, so that what is timed next finds free pages at hand.

    On a virtual machine that gives free pages back, the first touch costs twenty times the second: measured here,
    0.54 against 0.03 s for 256 MiB. Without this a benchmark that allocates measures the host.
    """
    program = (
        f"import mmap; pages = mmap.mmap(-1, {amount}); [pages.__setitem__(at, 1) for at in range(0, {amount}, 4096)]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def closings(before: int, begun: Callable[[], S], arrived: Callable[[], C], closed: Callable[[S, C, int], S]) -> S:
    """Close :data:`ROUNDS` rounds from what ``begun`` gives with contributions that just arrived; print figures.

    Only ``closed`` is timed. ``first_seconds`` is the process's first round, ``seconds`` the median of those after
    the first :data:`WARM_UP`, ``cpu_seconds`` what those took of all cores. Of memory beyond ``before`` bytes
    ``peak_bytes`` is the most at any time, ``extra_bytes`` the most that a round took beyond what was there when it
    began.
    """
    state, seconds, cpu, extra, most = begun(), [], [], 0, 0
    for version in range(1, ROUNDS + 1):
        with Watch() as watch:
            contributions = arrived()
            if version == 1:
                supply_memory()
            inputs, started, used = private_bytes(), time.perf_counter(), time.process_time()
            state = closed(state, contributions, version)
            seconds.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
        del contributions
        extra, most = max(extra, watch.most - inputs), max(most, watch.most)
    figures = {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "first_seconds": seconds[0],
        "cpu_seconds": statistics.median(cpu[WARM_UP:]),
        "peak_bytes": most - before,
        "extra_bytes": extra,
    }
    print(json.dumps(figures))
    return state
