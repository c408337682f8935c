"""A session hands its trainer's state off beside training, and a process of the same name starts with it."""

import threading
from typing import Any

import numpy as np

import gradientmail_core as gm
from gradientmail_core.engine.handoff import HandoffStore
from gradientmail_core.events import HandedOff
from gradientmail_core.protocol.belongings import Belongings
from gradientmail_core.sim.world import ToyModel

SETTINGS = gm.DiLoCo(sync_every=4, fragments=1)


class Counter:
    """A trainer whose state is how often it was asked for it."""

    def __init__(self) -> None:
        self.asked = 0
        self.loaded: Belongings | None = None

    def save(self) -> Belongings:
        self.asked += 1
        return Belongings({"asked": np.array([self.asked])}, {"asked": self.asked})

    def load(self, belongings: Belongings) -> None:
        self.loaded = belongings


def session_of(mailbox: gm.MemoryMailbox, counter: Counter, heard: Any, node: str = "a") -> gm.Session:
    return gm.Session(
        ToyModel(), mailbox=mailbox, algorithm=SETTINGS, node=node, handoff=counter, handoff_every=2, callbacks=[heard]
    )


def handed_off(mailbox: gm.MemoryMailbox) -> list[HandedOff]:
    done, events = threading.Event(), list[HandedOff]()

    def heard(event: Any) -> None:
        if isinstance(event, HandedOff):
            events.append(event)
            done.set()

    counter = Counter()
    with session_of(mailbox, counter, heard) as session:
        session.step()
        assert counter.asked == 0
        session.step()
        assert counter.asked == 1 and done.wait(30)
    return events


def test_the_next_process_of_the_name_gets_it_and_others_do_not() -> None:
    mailbox = gm.MemoryMailbox()
    assert [(event.node, event.step) for event in handed_off(mailbox)] == [("a", 2)]
    for node, expected in (("a", {"asked": 1}), ("b", None)):
        counter = Counter()
        with session_of(mailbox, counter, lambda event: None, node):
            assert (counter.loaded.plain if counter.loaded is not None else None) == expected


def test_what_holds_no_state_of_a_session_is_passed_over_with_a_word() -> None:
    mailbox, told = gm.MemoryMailbox(), list[str]()
    handed_off(mailbox)
    with session_of(mailbox, Counter(), lambda event: None, "b") as other:
        assert other._loop is not None and other._engine is not None
        other._loop.run(
            HandoffStore(other._host, other._engine.run_id).put(Belongings({}, {"trainer": {}, "session": {}}))
        )
    counter = Counter()
    with session_of(mailbox, counter, lambda event: told.append(str(event)), "b"):
        assert counter.loaded is None
    assert any("hand-off of b cannot be used" in line for line in told)
