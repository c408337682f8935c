import logging
from dataclasses import replace
from typing import get_args

import pytest

from gradientmail_core import events
from gradientmail_core.events import (
    Event,
    FragmentAligned,
    NodeGone,
    RoundCommitted,
    RunWaited,
    SessionEnded,
    SnapshotRefused,
    emitter,
    log_event,
)

ALIGNED = FragmentAligned(fragment=1, round=9, step=40, participants=2, tokens=640, merged=True, cosine=0.5)
REFUSED = SnapshotRefused(node="a", fragment=1, round=9, reason="stale")


def test_every_event_is_one_of_the_union() -> None:
    defined = {kind for kind in vars(events).values() if isinstance(kind, type) and kind.__module__ == events.__name__}
    assert defined == set(get_args(Event))


def test_a_callback_that_raises_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError("broken callback")

    emit = emitter([seen.append, broken, seen.append])
    emit(ALIGNED)
    emit(REFUSED)
    assert seen == [ALIGNED, ALIGNED, REFUSED, REFUSED]
    assert "FragmentAligned" in caplog.text
    assert "broken callback" in caplog.text


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (REFUSED, logging.INFO),
        (replace(REFUSED, reason="nonfinite"), logging.WARNING),
        (RunWaited("waiting for b"), logging.INFO),
        (SessionEnded("a", 3, ""), logging.INFO),
        (ALIGNED, logging.DEBUG),
    ],
)
def test_what_a_person_must_know_stands_out(event: Event, level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gradientmail")
    log_event(event)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, str(event))]


def test_sentences_say_what_happened() -> None:
    assert str(REFUSED) == "round 9 went on without the snapshot of a: stale"
    assert str(NodeGone("b", left=True)) == "b left"
    assert "no sign of life" in str(NodeGone("b", left=False))
    assert "without this node's" not in str(ALIGNED)
    void = RoundCommitted(fragment=0, round=4, participants=(), refused=("a: stale",), cosine=None, seconds=0.5)
    assert "nobody" in str(void)
    assert "cosine" not in str(void)
