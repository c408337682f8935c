"""An event loop whose time jumps to the next timer instead of waiting for it.

Tasks and futures are asyncio's own; the loop under them only runs what is ready, and when nothing is, moves its
clock to the next timer. So hours of a run pass in seconds, and callbacks run in an order that depends on nothing but
the program and its seeds: what is ready in the order it became so, timers by time and then by age. There is no I/O,
no other thread, and no context of its own for a callback, which makes an event cost about a microsecond. A loop with
nothing scheduled is a deadlock and raises :class:`Deadlock` rather than hang.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

from gradientmail_core.clock import TimeOver

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Deadlock(RuntimeError):
    """Every task waits for something that nothing will do."""


class VirtualLoop(asyncio.BaseEventLoop):
    """asyncio's loop on virtual time; starts at 0 seconds. One thread, no I/O, no executors."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._due: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._timers_made = 0
        self._nothing = asyncio.Handle(_nothing, (), self)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    get_debug = staticmethod(bool)
    """False, asked for each future."""

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback after those that are ready. Unlike asyncio's, it cannot be called off."""
        self._due.append((callback, args))
        return self._nothing

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback ``delay`` seconds from now."""
        return self.call_at(self._now + delay, callback, *args)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback at a time of this loop; the handle calls it off."""
        handle = asyncio.TimerHandle(when, callback, args, self)
        self.wake_at(when, _run_unless_cancelled, handle)
        return handle

    def wake_at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """:meth:`call_at` without a handle, which would cost more than the rest."""
        self._timers_made += 1
        heappush(self._timers, (when, self._timers_made, callback, args))

    def _run_once(self) -> None:
        due, timers = self._due, self._timers
        while not self._stopping:  # type: ignore[attr-defined]  # asyncio's own, not in its stubs
            while due:
                callback, args = due.popleft()
                callback(*args)
                if self._stopping:  # type: ignore[attr-defined]  # asyncio's own, not in its stubs
                    return
            if not timers:
                raise Deadlock("nothing is scheduled and nothing is ready")
            when, _, callback, args = heappop(timers)
            if when > self._now:
                self._now = when
            callback(*args)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer stays in the heap and does nothing when its time comes."""


def _nothing() -> None:
    """Stands behind the handle of :meth:`VirtualLoop.call_soon`."""


def _run_unless_cancelled(handle: asyncio.TimerHandle) -> None:
    if not handle.cancelled():
        handle._run()


def _wake(sleeper: "asyncio.Future[None]") -> None:
    if not sleeper.done():
        sleeper.set_result(None)


class VirtualClock:
    """A node's clock on a virtual loop: shifted by ``offset`` seconds and running ``rate`` times as fast.

    Freezing it holds up whatever awaits it, as SIGSTOP or a suspended laptop does, while its time goes on.
    """

    def __init__(self, loop: VirtualLoop, *, offset: float = 0.0, rate: float = 1.0) -> None:
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
        return self._offset + self._loop._now * self._rate

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        loop = self._loop
        sleeper = loop.create_future()
        if seconds <= 0:
            loop.call_soon(_wake, sleeper)
        else:
            loop.wake_at(loop._now + seconds / self._rate, _wake, sleeper)
        await sleeper
        if not self._thawed.is_set():
            await self._thawed.wait()

    async def within(self, seconds: float, work: Awaitable[T]) -> T:
        """The result of ``work``, or :class:`TimeOver` once ``seconds`` passed; ``work`` runs in the caller's task."""
        alarm = _Alarm(asyncio.current_task(self._loop))
        self._loop.wake_at(self._loop.time() + max(seconds, 0.0) / self._rate, alarm.ring)
        try:
            result = await work
        except asyncio.CancelledError:
            if not alarm.answered():
                raise
            raise TimeOver from None
        finally:
            alarm.task = None
        if not self._thawed.is_set():
            await self._thawed.wait()
        return result

    async def compute(self, work: Callable[[], T]) -> T:
        """Run the work now, in no virtual time."""
        return work()


class _Alarm:
    """Cancels a task when its time comes, unless it was disarmed."""

    __slots__ = ("rung", "task")

    def __init__(self, task: "asyncio.Task[Any] | None") -> None:
        self.task = task
        self.rung = False

    def ring(self) -> None:
        """Cancel the task."""
        if self.task is not None:
            self.rung = True
            self.task.cancel()

    def answered(self) -> bool:
        """True if the cancellation was this alarm's alone; it is taken back then."""
        return self.rung and self.task is not None and self.task.uncancel() == 0


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run ``main(loop)`` to its end on a fresh virtual loop."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
