"""Time, sleep and heavy computation, injected so that the same engine runs live and in simulation.

The engine never reads a wall clock of another machine: ``now`` is monotonic, in seconds, and only
differences of one clock's readings mean anything. ``compute`` keeps arithmetic off the event loop in
production and runs it inline, in zero time, under the simulator's virtual clock.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class TimeOver(Exception):
    """What was to happen within a time has not."""


class Clock(Protocol):
    """What the engine knows of time."""

    def now(self) -> float:
        """Seconds on a monotonic clock of this node."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; a negative or zero duration yields once."""
        ...

    async def within(self, seconds: float, work: Awaitable[T]) -> T:
        """The result of ``work``; it is cancelled after ``seconds``, and :class:`TimeOver` raised."""
        ...

    async def compute(self, work: Callable[[], T]) -> T:
        """Run ``work`` without blocking the event loop and return its result."""
        ...


async def first_within(clock: Clock, seconds: float, work: Awaitable[T]) -> T:
    """:meth:`Clock.within` by way of ``clock.sleep``. Does not wait for ``work`` to take note of its end."""
    task = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((task, timer), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeOver
    finally:
        timer.cancel()
        task.cancel()
        task.add_done_callback(_heard)


def _heard(task: "asyncio.Future[T]") -> None:
    """Take note of an abandoned task's error, so that nothing is logged about it."""
    if not task.cancelled():
        task.exception()


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

    async def within(self, seconds: float, work: Awaitable[T]) -> T:
        return await first_within(self, seconds, work)

    async def compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def close(self) -> None:
        """Release the worker thread; running work finishes."""
        self._worker.shutdown(wait=False)
