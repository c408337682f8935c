"""Virtual time for the wrappers' tests: waits end in order of their due times, at once."""

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from gradientmail_core.clock import first_within

T = TypeVar("T")


class VirtualClock:
    """A clock that jumps to the next due time whenever nothing else can run."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self._now + max(seconds, 0.0), next(self._order), done))
        await done

    async def within(self, seconds: float, work: Awaitable[T]) -> T:
        """See :meth:`Clock.within`."""
        return await first_within(self, seconds, work)

    async def compute(self, work: Callable[[], T]) -> T:
        """Run ``work`` here."""
        return work()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; a deadlock is an assertion, not a hang."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0)
            while asyncio.get_running_loop()._ready:  # type: ignore[attr-defined]  # nobody else can tell
                await asyncio.sleep(0)
            if not task.done():
                self._advance()
        return task.result()

    def _advance(self) -> None:
        while self._waiting and self._waiting[0][2].done():
            heapq.heappop(self._waiting)
        assert self._waiting, "nothing is left to wait for"
        self._now, _, done = heapq.heappop(self._waiting)
        done.set_result(None)


def run_virtually(work: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` with a fresh virtual clock."""

    async def main() -> T:
        clock = VirtualClock()
        return await clock.run(work(clock))

    return asyncio.run(main())
