"""Threads for work that may block for ever, as on a file server that is gone.

The threads of :mod:`concurrent.futures` are waited for when the interpreter ends, however long they take. These are
not: whoever has waited long enough leaves them behind, and the process can end.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class Workers(Executor):
    """At most ``most`` threads, begun as they are needed."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._living = 0
        self._begun = 0
        self._closed = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # nobody who stops waiting for it cancels it

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """See :meth:`Executor.submit`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("These workers are closed.")
            self._jobs.put((future, partial(work, *args, **kwargs)))
            if self._begun < self._most:
                self._begun += 1
                self._living += 1
                name = f"{self._name}_{self._begun}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after what was submitted; see :meth:`Executor.shutdown`."""
        ended = self.closed()
        if wait:
            ended.result()

    def closed(self) -> "Future[None]":
        """Take no more work; settled once all that was submitted is done."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._begun):
                    self._jobs.put(None)
                if not self._living:
                    self._ended.set_result(None)
        return self._ended

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del job, future, work
        with self._lock:
            self._living -= 1
            if not self._living:
                self._ended.set_result(None)
