"""A session hands its trainer's state off beside training, and a process of the same name starts with it."""

import asyncio
import threading
from typing import Any, ClassVar

import numpy as np
import pytest

import gradientmail_core as gm
from gradientmail_core.engine.handoff import HandoffStore
from gradientmail_core.events import HandedOff, HandoffFailed, RunResumed, StateOmitted, log_event
from gradientmail_core.mailbox.base import whole_listing
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

    def load(self, belongings: Belongings) -> bool | None:
        self.loaded = belongings
        return None


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


@pytest.mark.parametrize("plain", [{"trainer": {}, "session": {}}, {"trainer": {}}, {}])
def test_what_holds_no_state_of_a_session_is_passed_over_with_a_word(plain: dict[str, object]) -> None:
    mailbox, told = gm.MemoryMailbox(), list[str]()
    handed_off(mailbox)
    with session_of(mailbox, Counter(), lambda event: None, "b") as other:
        assert other._loop is not None and other._engine is not None
        other._loop.run(HandoffStore(other._host, other._engine.run_id).put(Belongings({}, plain)))
    counter = Counter()
    with session_of(mailbox, counter, lambda event: told.append(str(event)), "b"):
        assert counter.loaded is None
    assert any("hand-off of b cannot be used" in line for line in told)


async def damaged(mailbox: gm.MemoryMailbox) -> str:
    victim = next(entry.key for entry in await whole_listing(mailbox, "handoff/") if entry.key.endswith("/0000"))
    await mailbox.put(victim, b"junk")
    return victim


def test_a_damaged_one_is_a_warning_that_names_it_and_what_happens_instead(caplog: pytest.LogCaptureFixture) -> None:
    mailbox = gm.MemoryMailbox()
    handed_off(mailbox)
    victim = asyncio.run(damaged(mailbox))
    counter = Counter()
    with session_of(mailbox, counter, log_event):
        assert counter.loaded is None
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    name = victim.rsplit("/", 1)[0]
    assert [line for line in said if name in line and "0000 is damaged" in line and "newest commits" in line]


def test_what_cannot_be_handed_off_is_told_once_and_training_goes_on() -> None:
    class Lacking(Counter):
        omitted: ClassVar[dict[str, str]] = {"the place in the data": "its loader does not tell"}

        def save(self) -> Belongings:
            self.asked += 1
            return Belongings({}, {"no number": float("nan")})

    told, failed = list[gm.Event](), threading.Event()

    def heard(event: gm.Event) -> None:
        told.append(event)
        if isinstance(event, HandoffFailed):
            failed.set()

    with session_of(gm.MemoryMailbox(), Lacking(), heard) as session:
        for _ in range(6):
            session.step()
            assert session.joined
        assert failed.wait(30)
    assert [(event.part, event.reason) for event in told if isinstance(event, StateOmitted)] == [
        ("the place in the data", "its loader does not tell")
    ]


def test_a_checkpoint_that_is_given_comes_before_the_hand_off_and_a_trainer_may_decline_it() -> None:
    mailbox = gm.MemoryMailbox()
    handed_off(mailbox)
    counter = Counter()
    given = session_of(mailbox, counter, lambda event: None)
    with session_of(mailbox, Counter(), lambda event: None, "b") as other:
        state = other.state_dict()
    given.load_state_dict(state)
    with given:
        assert counter.loaded is None

    class Declining(Counter):
        def load(self, belongings: Belongings) -> bool:
            return False

    events = list[gm.Event]()
    with session_of(mailbox, Declining(), events.append):
        assert not [event for event in events if isinstance(event, RunResumed)]
