"""What any node's life has, whatever the algorithm: tasks that end together, one lasting fault, a released lease.

A task that fails for good ends nothing by itself: the failure is kept and told once, and the training thread decides.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine

from gradientmail_core.engine.run import Board, Host
from gradientmail_core.events import SessionEnded
from gradientmail_core.protocol.keys import LeaseState

LEAVING_SECONDS = 2.0


class Life(ABC):
    """A node from its first beat to its last; ``serving`` once it was elected syncer and its trainer is to hold."""

    def __init__(self, host: Host, board: Board) -> None:
        self._host = host
        self.board = board
        self._tasks: list[asyncio.Task[None]] = []
        self._on_failure: Callable[[BaseException], None] = lambda failure: None
        self.serving = False
        self.failure: BaseException | None = None

    @abstractmethod
    async def _beat(self, state: LeaseState | None = None) -> None:
        """Write a beat, in this state from now on if one is given."""

    @property
    @abstractmethod
    def rounds_seen(self) -> int:
        """Rounds of the run that are over, as far as this node knows."""

    @property
    def live_learners(self) -> int:
        """Learners alive, this node included."""
        return max(len(self.board.live_learners()), 1)

    def accompany(self, work: Coroutine[object, object, None]) -> None:
        """Run ``work`` beside the node's own tasks and end it with them; its failure is the node's."""
        self._spawn(work)

    def pause(self) -> None:
        """Say that the trainer evaluates or is held: nobody waits for this node."""
        self._spawn(self._beat("e"))

    def resume(self) -> None:
        """Say that the trainer trains again."""
        self._spawn(self._beat("t"))

    async def abort(self, reason: str) -> None:
        """Stop at once, publish nothing more, and release the lease if the store answers quickly."""
        await self.stop()
        with contextlib.suppress(Exception):  # a lease that cannot be released runs out by itself
            await self._host.clock.within(LEAVING_SECONDS, self._beat("x"))
        self._host.emit(SessionEnded(self._host.node, self.rounds_seen, reason))

    async def stop(self) -> None:
        """End every task and write nothing more."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task in self._tasks:
            self._tasks.remove(task)
        if task.cancelled():
            return
        failure = task.exception()
        if failure is not None and self.failure is None:
            self.failure = failure
            self._on_failure(failure)
