"""The queue in a training loop: loaded ahead on a thread, released on leaving, and clear when loading fails."""

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from gradientmail_core.clock import SystemClock
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.patterns.party import Party
from gradientmail_core.patterns.shared_queue import SharedQueue
from gradientmail_core.patterns.units import UnitLedger
from gradientmail_core.session.background import Loop

PERIOD = 0.02


class Farm:
    """Queues on one mailbox, each on the loop of a node of its own."""

    def __init__(self) -> None:
        self.mailbox = MemoryMailbox("farm")
        self.dead: set[str] = set()
        self.holds = 0
        self.loops: list[Loop] = []

    def held(self) -> AbstractContextManager[None]:
        self.holds += 1
        return nullcontext()

    def queue(self, node: str, units: int, load=lambda unit: unit, *, block: int = 2, ahead: int = 2) -> SharedQueue:
        party = Party(
            run="5a" * 16, node=node, incarnation="0f", mailbox=self.mailbox, clock=SystemClock(), period=PERIOD,
            nonce=lambda: f"{time.monotonic_ns():x}", alive=lambda name, since: name not in self.dead,
            emit=lambda event: None,
        )  # fmt: skip
        self.loops.append(Loop())
        return SharedQueue(UnitLedger(party, "q", units, block), self.loops[-1], load, ahead=ahead, held=self.held)

    def keys(self) -> list[str]:
        return [entry.key for entry in self.mailbox._entries("units/", "")]


@pytest.fixture
def farm():
    place = Farm()
    yield place
    for loop in place.loops:
        loop.stop()


def test_units_are_loaded_ahead_on_another_thread(farm: Farm) -> None:
    threads: set[str] = set()
    loaded = threading.Semaphore(0)

    def load(unit: int) -> str:
        threads.add(threading.current_thread().name)
        loaded.release()
        return f"unit {unit}"

    taken = iter(farm.queue("a", 9, load, ahead=3))
    first = next(taken)
    for _ in range(4):
        assert loaded.acquire(timeout=30), "three are ready and one is in the loader's hand"
    assert [first, *taken] == [f"unit {unit}" for unit in range(9)]
    assert threads == {"gradientmail-units"}
    assert farm.keys() == [f"units/q/{block:08d}/done" for block in range(5)]


def test_leaving_the_loop_gives_back_what_is_not_finished(farm: Farm) -> None:
    taken: Any = iter(farm.queue("a", 8, block=4))
    assert [next(taken) for _ in range(3)] == [0, 1, 2]
    taken.close()
    assert list(farm.queue("b", 8, block=4)) == [2, 3, 4, 5, 6, 7], "0 and 1 were finished, 2 was in work"


def test_a_failing_load_is_raised_in_the_loop(farm: Farm) -> None:
    def load(unit: int) -> int:
        return 1 // (unit - 2)

    with pytest.raises(ZeroDivisionError):
        list(farm.queue("a", 5, load))


def test_a_loop_that_must_wait_is_held_and_ends_when_others_are_done(farm: Farm) -> None:
    holder = iter(farm.queue("a", 2, block=2))
    next(holder)
    results: list[list[int]] = []
    waiting = threading.Thread(target=lambda: results.append(list(farm.queue("b", 2, block=2))))
    waiting.start()
    deadline = time.monotonic() + 30
    while not farm.holds and time.monotonic() < deadline:
        time.sleep(0.01)
    assert farm.holds == 1 and not results
    assert list(holder) == [1]
    waiting.join(30)
    assert results == [[]]


def test_a_checkpoint_holds_how_far_a_block_came(farm: Farm) -> None:
    first = farm.queue("a", 6, block=6, ahead=1)
    taken = iter(first)
    assert [next(taken) for _ in range(4)] == [0, 1, 2, 3]
    state = first.state_dict()
    first.stop()
    farm.dead.add("a")
    again = farm.queue("c", 6, block=6)
    again.load_state_dict(state)
    assert list(again) == [3, 4, 5]


def test_units_can_be_taken_several_at_a_time(farm: Farm) -> None:
    queue = farm.queue("a", 4)
    taken = [held for held in (queue.take() for _ in range(3)) if held is not None]
    assert [held.value for held in taken] == [0, 1, 2]
    for held in taken:
        queue.trained(held)
    assert queue.state_dict() == {"1": 1} and not queue.finished
    queue.release()
    assert [key.rpartition("/")[2] for key in Farm.keys(farm)] == ["done", "claim-0000", "release-0000"]


def test_nothing_ahead_is_refused(farm: Farm) -> None:
    with pytest.raises(ConfigurationError):
        farm.queue("a", 4, ahead=0)
