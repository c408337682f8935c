"""The patterns for a training loop: shared work, barriers and ranks, done by the session's own engine thread.

While the training thread waits here the node counts as paused, so no round waits for it, and commits that arrive are
written at the next step.
"""

import time
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from gradientmail_core.engine.node import Node
from gradientmail_core.engine.run import Host
from gradientmail_core.errors import ConfigurationError, RankLost, SessionClosed
from gradientmail_core.patterns.barrier import pass_barrier
from gradientmail_core.patterns.party import Party
from gradientmail_core.patterns.ranks import Ranks
from gradientmail_core.patterns.shared_passes import SharedPasses, newest_pass, queue_name
from gradientmail_core.patterns.shared_queue import SharedQueue
from gradientmail_core.patterns.units import UnitLedger
from gradientmail_core.protocol.recipes import RankKey
from gradientmail_core.session.background import Loop

T = TypeVar("T")
V = TypeVar("V")


class Recipes:
    """The patterns of one joined session; ``held()`` is entered while the training thread waits."""

    def __init__(self, host: Host, engine: Node, loop: Loop, held: Callable[[], AbstractContextManager[None]]) -> None:
        self._engine = engine
        self._loop = loop
        self._held = held
        self._queues: list[SharedQueue[Any]] = []
        self._ranks: Ranks | None = None
        self._rank: RankKey | None = None
        self._lost: RankKey | None = None
        self._party = Party(
            run=engine.run_id,
            node=host.node,
            incarnation=host.incarnation,
            mailbox=engine.board.host.mailbox,
            clock=host.clock,
            period=host.timeouts.period,
            nonce=host.nonce,
            alive=engine.board.may_live,
            emit=host.emit,
            store=engine.store,
        )

    def shared_queue(
        self, units: int, load: Callable[[int], V], *, name: str, block: int, ahead: int
    ) -> SharedQueue[V]:
        """A queue of ``units`` that all nodes share; see :class:`SharedQueue`."""
        return self._queue(UnitLedger(self._party, name, units, block), load, ahead)

    def _queue(self, ledger: UnitLedger, load: Callable[[int], V], ahead: int, *, wait: bool = True) -> SharedQueue[V]:
        queue = SharedQueue(ledger, self._loop, load, ahead=ahead, held=self._held, wait=wait)
        self._queues.append(queue)
        return queue

    def shared_passes(self, units: int, *, name: str, block: int) -> SharedPasses:
        """``units`` that all nodes share, pass after pass; see :class:`SharedPasses`."""
        ledgers: dict[int, UnitLedger] = {}

        def opened(number: int) -> SharedQueue[int]:
            """A ledger remembers since when it has not heard of a holder, so an unfinished pass keeps its own."""
            for old in [old for old, ledger in ledgers.items() if ledger.finished]:
                del ledgers[old]
            ledger = ledgers.setdefault(number, UnitLedger(self._party, queue_name(name, number), units, block))
            return self._queue(ledger, _itself, ahead=block, wait=False)

        return SharedPasses(units, opened, self._wait(newest_pass(self._party, name, units, block)))

    def barrier(self, name: str, count: int, timeout: float | None) -> None:
        """Hold the training thread until ``count`` nodes are at barrier ``name``."""
        self._wait(pass_barrier(self._party, name, count, timeout))

    def take_rank(self, count: int) -> int:
        """Take one of ``count`` ranks, waiting for a free one, and keep watch over it."""
        watched = self._ranks is not None
        self._ranks = self._ranks or Ranks(self._party, count)
        key = self._wait(self._ranks.take())
        self._rank, self._lost = key, None
        if not watched:
            self._wait(self._watching())
        return key.rank

    @property
    def rank(self) -> int | None:
        """The rank this node holds; None without ranks, or while it holds none."""
        return self._rank.rank if self._rank is not None else None

    def check_rank(self) -> None:
        """Raise :class:`RankLost`, once, if the rank went back to the node that held it before."""
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise RankLost(
                f"Rank {lost.rank} went back to the node that held it before, which was only slow.",
                "Take another one with session.take_rank(), or leave.",
            )

    def release(self, seconds: float) -> None:
        """Give back what this node holds, before it leaves; what takes longer than that runs out with its lease."""
        end = time.monotonic() + seconds
        for queue in self._queues:
            queue.release(max(end - time.monotonic(), 0.0))
        if self._ranks is not None and self._rank is not None:
            dropped = self._loop.spawn(self._ranks.drop(self._rank))
            _, late = wait([dropped], max(end - time.monotonic(), 0.0))
            if not late:
                dropped.result()

    def stop(self) -> None:
        """Stop loading; claims run out with the lease."""
        for queue in self._queues:
            queue.stop()

    def _wait(self, work: Coroutine[Any, None, T]) -> T:
        with self._held():
            return self._loop.run(work)

    async def _watching(self) -> None:
        self._engine.accompany(self._watch())

    async def _watch(self) -> None:
        while self._ranks is not None:
            await self._party.clock.sleep(self._party.period)
            if self._rank is not None and not await self._ranks.holds(self._rank):
                self._lost, self._rank = self._rank, None


def _itself(unit: int) -> int:
    """Units that are numbers and nothing more."""
    return unit


class Patterns:
    """What a session offers of the patterns."""

    def __init__(self, ranks: int | None) -> None:
        self._ranks = ranks
        self._recipes: Recipes | None = None

    def shared_queue(
        self, units: int, load: Callable[[int], Any] = _itself, *, name: str = "data", block: int = 1, ahead: int = 2
    ) -> SharedQueue[Any]:
        """Units 0 to ``units`` - 1, dealt among all nodes that iterate over the queue of this name.

        ``load(unit)`` runs on a thread, ``ahead`` units before they are needed. A node claims ``block`` units at once:
        make that some minutes' worth. A name is used once in a run, for example once an epoch.
        """
        return self._joined_recipes().shared_queue(units, load, name=name, block=block, ahead=ahead)

    def shared_passes(self, units: int, *, name: str = "data", block: int = 1) -> SharedPasses:
        """Units 0 to ``units`` - 1, dealt pass after pass, for whoever holds several at once, as a data loader does.

        Nodes that give another ``units``, ``name`` or ``block`` do not share with these. See :class:`SharedPasses`.
        """
        return self._joined_recipes().shared_passes(units, name=f"{name}-{units}x{block}", block=block)

    def barrier(self, name: str, count: int, timeout: float | None = None) -> None:
        """Wait until ``count`` living nodes, this one included, are at the barrier of this name.

        Raises :class:`WaitTimeout` after ``timeout`` seconds. A name is used once in a run.
        """
        self._joined_recipes().barrier(name, count, timeout)

    @property
    def rank(self) -> int | None:
        """The slice of the data this node holds, of ``ranks``; None without ``ranks``, or after :class:`RankLost`."""
        return self._recipes.rank if self._recipes is not None else None

    def take_rank(self) -> int:
        """Take a free rank after :class:`RankLost`; waits until there is one."""
        if self._ranks is None:
            raise ConfigurationError("This session has no ranks.", "Give Session(..., ranks=N).")
        return self._joined_recipes().take_rank(self._ranks)

    def _joined_recipes(self) -> Recipes:
        if self._recipes is None:
            raise SessionClosed("The session is not joined.", "Use this between join() and close().")
        return self._recipes
