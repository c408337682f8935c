"""A queue of units that all nodes of a run share, for a training loop: whoever is faster works on more of them.

    for sample in session.shared_queue(units=1000, load=read_shard):
        train(sample)
        session.step()

Units are claimed in blocks, and loaded ahead on a thread of the queue's own, which also does the claiming: the
training thread only takes what is there. A unit counts as finished when the loop asks for the next one; leaving the
loop releases what is left, and other nodes go on with it. The loop ends when every unit is finished, by anyone.
"""

import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.patterns.units import Block, UnitLedger

V = TypeVar("V")
T = TypeVar("T")

LOOK_SECONDS = 0.1
HOLD_SECONDS = 1.0
RELEASE_SECONDS = 30.0


class Engine(Protocol):
    """The loop that does a pattern's requests."""

    def run(self, work: Coroutine[Any, None, T]) -> T:
        """Run and wait."""
        ...

    def spawn(self, work: Coroutine[Any, None, T]) -> "Future[T]":
        """Run without waiting."""
        ...


@dataclass(frozen=True, slots=True)
class Taken(Generic[V]):
    """A unit in this node's hands, and what ``load`` made of it."""

    block: Block
    unit: int
    value: V


@dataclass(frozen=True, slots=True)
class _End:
    failure: BaseException | None = None


_Item: TypeAlias = Taken[V] | _End


class SharedQueue(Generic[V]):
    """Iterates over what ``load`` makes of this node's units; ``ahead`` are loaded before they are asked for.

    ``held()`` is entered while the loop must wait, so that no round waits for this node. Iterate once; or, for a loop
    that holds several units at a time, :meth:`take` them and say of each when it was :meth:`trained`. Without ``wait``
    the end comes when nothing is left to claim, though others may still work on what they hold.
    """

    def __init__(
        self,
        ledger: UnitLedger,
        engine: Engine,
        load: Callable[[int], V],
        *,
        ahead: int,
        held: Callable[[], AbstractContextManager[None]],
        wait: bool = True,
    ) -> None:
        if ahead < 1:
            raise ConfigurationError(f"ahead is {ahead}.", "Load at least 1 unit ahead.")
        self._ledger = ledger
        self._engine = engine
        self._load = load
        self._held = held
        self._wait = wait
        self._begun = self._over = False
        self._ready: queue.Queue[_Item[V]] = queue.Queue(ahead)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._blocks: dict[int, Block] = {}
        self._finishing: list[Future[None]] = []

    def __iter__(self) -> Iterator[V]:
        try:
            while (taken := self.take()) is not None:
                yield taken.value
                self.trained(taken)
        finally:
            self.release()

    def take(self) -> Taken[V] | None:
        """The next unit; None from the end on. Raises what ``load`` and the store raise."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._fill, name="gradientmail-units", daemon=True).start()
        match None if self._over else self._next():
            case _End(failure=failure):
                self._over = True
                if failure is not None:
                    raise failure
                return None
            case item:
                return item

    @property
    def finished(self) -> bool:
        """True once every unit is known to be finished, by anyone."""
        return self._ledger.finished

    def state_dict(self) -> dict[str, int]:
        """How far this node came with each block it holds, for a checkpoint; plain JSON."""
        with self._lock:
            return {str(index): block.done for index, block in self._blocks.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on within the blocks this node held at a checkpoint; before iterating."""
        self._ledger.came_so_far({int(index): int(done) for index, done in state.items()})

    def release(self, seconds: float = RELEASE_SECONDS) -> None:
        """Stop loading and give back what is not finished. Does nothing the second time, or after :meth:`stop`.

        Where the store does not answer for so many ``seconds`` it goes on in the background.
        """
        with self._lock:
            blocks, self._blocks = [] if self._stopping.is_set() else list(self._blocks.values()), {}
            finishing, self._finishing = [] if self._stopping.is_set() else self._finishing, []
            self._stopping.set()
        giving = [*finishing, *(self._engine.spawn(self._ledger.release(block)) for block in blocks)]
        for future in wait(giving, seconds).done:
            future.result()

    def stop(self) -> None:
        """Stop loading and write nothing more; what is held stays claimed until this node is gone."""
        self._stopping.set()

    def _next(self) -> _Item[V]:
        try:
            return self._ready.get(timeout=HOLD_SECONDS)
        except queue.Empty:
            with self._held():
                return self._ready.get()

    def trained(self, taken: Taken[V]) -> None:
        """``taken`` is finished; units of one block in the order in which they were taken."""
        with self._lock:
            if self._stopping.is_set():
                return
            index, unit = taken.block.index, taken.unit
            current = replace(self._blocks[index], done=unit + 1 - taken.block.first)
            self._blocks[index] = current
            whole = unit + 1 == current.last
            if whole:
                del self._blocks[index]
        if whole:
            self._finishing = [future for future in self._finishing if not future.done()]
            self._finishing.append(self._engine.spawn(self._ledger.finish(current)))

    def _fill(self) -> None:
        try:
            while not self._stopping.is_set() and (block := self._claimed()) is not None:
                if not self._took(block) or not self._load_all(block):
                    return
            self._offer(_End())
        except BaseException as failure:
            self._offer(_End(failure))

    def _claimed(self) -> Block | None:
        return self._engine.run(self._ledger.claim(wait=self._wait))

    def _took(self, block: Block) -> bool:
        """Note a block as held; False, with the block given back, if the queue was released meanwhile."""
        with self._lock:
            late = self._stopping.is_set()
            if not late:
                self._blocks[block.index] = block
        if late:
            self._engine.run(self._ledger.release(block))
        return not late

    def _load_all(self, block: Block) -> bool:
        """Load a block's units; False if the queue was stopped meanwhile."""
        return all(self._offer(Taken(block, unit, self._load(unit))) for unit in block.units)

    def _offer(self, item: _Item[V]) -> bool:
        while not self._stopping.is_set():
            try:
                self._ready.put(item, timeout=LOOK_SECONDS)
                return True
            except queue.Full:
                continue
        return False
