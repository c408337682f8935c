"""Time, sleep and heavy computation, injected so that the same engine runs live and in simulation.

The engine never reads a wall clock of another machine: ``now`` is monotonic, in seconds, and only
differences of one clock's readings mean anything. ``compute`` keeps arithmetic off the event loop in
production and runs it inline, in zero time, under the simulator's virtual clock.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """What the engine knows of time."""

    def now(self) -> float:
        """Seconds on a monotonic clock of this node."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; a negative or zero duration yields once."""
        ...

    async def compute(self, work: Callable[[], T]) -> T:
        """Run ``work`` without blocking the event loop and return its result."""
        ...


class SystemClock:
    """The machine's monotonic clock, with one worker thread for arithmetic.

    One worker is enough: kernels spread themselves over the cores, and two merges side by side would
    only share the same memory bandwidth.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradientmail-compute")

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, 0.0))

    async def compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def close(self) -> None:
        """Release the worker thread; running work finishes."""
        self._worker.shutdown(wait=False)
