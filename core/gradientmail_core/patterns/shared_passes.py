"""Units dealt among the nodes pass after pass, for a loop that holds several of them at once: a data loader.

A pass is a queue of its own. A data loader is asked for the next batch before the last one was trained on, so it must
never wait there for what other nodes hold: two of them would wait for each other. So a pass ends, for this node, when
nothing is left to claim. What a node held when it died is claimed by others as soon as its lease ran out: at the latest
when they begin their next pass, together with that one. Only the last pass of all can lose such units.

Nodes name passes by number. One that comes late begins with the newest that anybody began.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.patterns.party import Party
from gradientmail_core.patterns.shared_queue import SharedQueue, Taken
from gradientmail_core.patterns.units import UnitLedger

State: TypeAlias = dict[str, dict[str, int]]
"""How far this node came with each block it holds, by pass; plain JSON."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit to train on, of a pass."""

    number: int
    unit: int


@dataclass(frozen=True, slots=True)
class _Held:
    queue: SharedQueue[int]
    taken: Taken[int]
    unit: Unit


def queue_name(name: str, number: int) -> str:
    """The name of the queue that is pass ``number`` of ``name``."""
    return f"{name}-{number:06d}"


async def newest_pass(party: Party, name: str, units: int, block: int) -> int:
    """The number of the newest pass with units left, or of the first one that nobody began: a few listings."""
    number = await _newest_begun(party, name)
    if number < 0:
        return 0
    ledger = UnitLedger(party, queue_name(name, number), units, block)
    await ledger.look()
    return number + 1 if ledger.finished else number


async def _newest_begun(party: Party, name: str) -> int:
    async def begun(number: int) -> bool:
        return bool([entry async for entry in party.mailbox.list(f"units/{queue_name(name, number)}/")])

    high = 1
    while await begun(high - 1):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await begun(middle - 1) else (low, middle)
    return low - 1


class SharedPasses:
    """``open_queue(pass)`` gives this node's view of a pass; ``first`` is the one to begin with."""

    def __init__(self, units: int, open_queue: Callable[[int], SharedQueue[int]], first: int) -> None:
        if units < 1:
            raise ConfigurationError("A queue of no units has nothing to deal.", "Give a dataset with samples in it.")
        self._open_queue = open_queue
        self.number = first
        self._earlier = [first - 1] if first else []
        self._chain: deque[tuple[int, SharedQueue[int]]] = deque()
        self._opened: dict[int, SharedQueue[int]] = {}
        self._begun = self._over = False
        self._returned: deque[_Held] = deque()
        self._waiting: deque[list[_Held]] = deque()
        self._saved: Mapping[str, Mapping[str, int]] = {}

    def begin(self, at_least: int = 0) -> None:
        """Go on with the pass, or where it is over with the next; with ``at_least`` if that is later.

        Units that were drawn and not confirmed are drawn again, first of all.
        """
        self._returned.extendleft(reversed([held for batch in self._waiting for held in batch]))
        self._waiting.clear()
        number = max(self.number + self._over, at_least)
        if self._begun and number == self.number:
            return
        if self._begun:
            self._earlier.append(self.number)
        self._begun, self._over, self.number = True, False, number
        self._chain = deque((each, self._opening(each)) for each in [*self._earlier, number])

    def draw(self, count: int) -> list[Unit]:
        """The next ``count`` units; fewer, or none, at the end of the pass."""
        batch: list[_Held] = []
        while len(batch) < count and (held := self._next()) is not None:
            batch.append(held)
        if batch:
            self._waiting.append(batch)
        return [held.unit for held in batch]

    def confirm(self) -> None:
        """What was drawn first has been trained on; does nothing where nothing was drawn."""
        for held in self._waiting.popleft() if self._waiting else ():
            held.queue.trained(held.taken)

    def drop_last(self) -> None:
        """What was drawn last is not to be trained on by anybody: it is finished with what was drawn before it."""
        dropped = self._waiting.pop() if self._waiting else []
        if self._waiting:
            self._waiting[-1].extend(dropped)
        for held in () if self._waiting else dropped:
            held.queue.trained(held.taken)

    def state_dict(self) -> State:
        """How far this node came with what it holds, for a checkpoint."""
        states = {str(number): queue.state_dict() for number, queue in self._opened.items()}
        return {number: state for number, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Go on within the blocks this node held at a checkpoint; before :meth:`begin`."""
        self._saved = dict(state)

    def _opening(self, number: int) -> SharedQueue[int]:
        queue = self._open_queue(number)
        queue.load_state_dict(self._saved.get(str(number), {}))
        self._opened[number] = queue
        return queue

    def _next(self) -> _Held | None:
        if self._returned:
            return self._returned.popleft()
        while self._chain:
            number, queue = self._chain[0]
            taken = queue.take()
            if taken is not None:
                return _Held(queue, taken, Unit(number, taken.value))
            self._chain.popleft()
            if number in self._earlier and queue.finished:
                self._earlier.remove(number)
        self._over = True
        return None
