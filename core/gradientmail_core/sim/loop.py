"""An event loop whose time jumps to the next timer instead of waiting for it.

The loop is asyncio's own; only its selector and its clock are replaced. A select with a time-out advances the
virtual clock by that time-out and returns at once, so hours of a run pass in seconds and callbacks run in an
order that depends on nothing but the program and its seeds. A loop with nothing scheduled is a deadlock and
raises :class:`Deadlock` rather than hang.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

RESOLUTION_SECONDS = 1e-6  # asyncio adds it to the time; a smaller one is lost in a clock of months


class Deadlock(RuntimeError):
    """Every task waits for something that nothing will do."""


class _JumpingSelector(selectors.BaseSelector):
    """Reports no I/O and moves the clock by each time-out it is given."""

    def __init__(self) -> None:
        self.now = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("nothing is scheduled and nothing is ready")
        self.now += max(timeout, 0.0)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's loop on virtual time; starts at 0 seconds."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = RESOLUTION_SECONDS

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now


class VirtualClock:
    """A node's clock on a virtual loop: shifted by ``offset`` seconds and running ``rate`` times as fast.

    Freezing it holds up whatever awaits it, as SIGSTOP or a suspended laptop does, while its time goes on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, offset: float = 0.0, rate: float = 1.0) -> None:
        self._loop = loop
        self._offset = offset
        self._rate = rate
        self._thawed = asyncio.Event()
        self._thawed.set()

    def freeze(self) -> None:
        """Hold up the node until :meth:`thaw`."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Let the node go on."""
        self._thawed.set()

    def now(self) -> float:
        """Seconds on this node's clock."""
        return self._offset + self._loop.time() * self._rate

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        await asyncio.sleep(max(seconds, 0.0) / self._rate)
        if not self._thawed.is_set():
            await self._thawed.wait()

    async def compute(self, work: Callable[[], T]) -> T:
        """Run the work now, in no virtual time."""
        return work()


def run_virtually(main: Callable[[asyncio.AbstractEventLoop], Coroutine[Any, Any, T]]) -> T:
    """Run ``main(loop)`` to its end on a fresh virtual loop."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
