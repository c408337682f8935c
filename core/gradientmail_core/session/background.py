"""An event loop on a thread of its own: the one place where a thread is started for the engine.

A notebook already runs a loop on the main thread, so the engine never borrows the caller's. Coroutines are handed
over and waited for; a wait that is broken off (Ctrl-C) cancels what it waited for.
"""

import asyncio
import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

JOIN_THREAD_SECONDS = 5.0
CANCEL_SECONDS = 2.0

logger = logging.getLogger("gradientmail")


class Loop:
    """An event loop on a thread of its own; coroutines are run from outside and waited for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gradientmail", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, None, T]) -> T:
        """The coroutine's result; Ctrl-C cancels it, however early it comes."""
        outcome: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(self._begin, work, outcome)
            return outcome.result()
        except BaseException:
            outcome.cancel()
            raise

    def _begin(self, work: Coroutine[object, None, T], outcome: "Future[T]") -> None:
        task = self._loop.create_task(work)
        task.add_done_callback(partial(_settle, outcome))
        outcome.add_done_callback(partial(self._cancel_with, task))

    def _cancel_with(self, task: "asyncio.Task[T]", outcome: "Future[T]") -> None:
        if outcome.cancelled():
            self._loop.call_soon_threadsafe(task.cancel)

    def spawn(self, work: Coroutine[object, None, T]) -> "Future[T]":
        """Run a coroutine without waiting for it; what it raises is logged."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(_log_failure)
        return future

    def call(self, work: Callable[[], object]) -> None:
        """Call a plain function on the loop's thread, without waiting."""
        self._loop.call_soon_threadsafe(work)

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CANCEL_SECONDS)

    def stop(self) -> None:
        """End the thread; what still waits on it is cancelled. Safe to call twice."""
        if self._loop.is_closed():
            return
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_THREAD_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


def _settle(outcome: "Future[T]", task: "asyncio.Task[T]") -> None:
    """Hand over how the task ended, unless nobody waits for it any more."""
    with suppress(InvalidStateError):
        if task.cancelled():
            outcome.cancel()
        elif (failure := task.exception()) is not None:
            outcome.set_exception(failure)
        else:
            outcome.set_result(task.result())


def _log_failure(future: "Future[Any]") -> None:
    if not future.cancelled() and (failure := future.exception()) is not None:
        logger.warning("Work in the background failed: %s", failure)


def at_exit(method: Callable[[], None]) -> None:
    """Call a bound method when the interpreter ends, if its object is still there, while thread pools still work.

    They end before the functions of ``atexit`` are called, and a mailbox may need them for a last request; the hook
    that pools use themselves comes early enough. Where Python has it no more, ``atexit`` must do.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (still := reference()) is not None:
            still()

    register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
    register(call)
