"""A checkpoint's counters: what comes back, what starts anew, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gradientmail_core.algorithms.alignment import Mode
from gradientmail_core.engine.aligning import Memory
from gradientmail_core.engine.learner import LearnerState, Outstanding, Track, books
from gradientmail_core.engine.ledger import Account
from gradientmail_core.engine.residuals import LeftOver
from gradientmail_core.engine.resuming import kept, parse_saved, resumed, saved_json
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.error_feedback import Residual
from tests.core.engine.parts import first_head, run_of

RUN = run_of()
HEADS = [first_head(RUN, fragment) for fragment in range(RUN.fragments)]
STATE = LearnerState(
    tracks=tuple(Track(head.version, head.digest, head.due, 3, 24, Outstanding(9)) for head in HEADS),
    books=(Account(24), Account(8, (("late", 16),))),
    local_step=13,
    tokens=104,
    lead=7,
    poisoned=1,
)

MEMORIES = (Memory(Mode(carrying=True, streak=1), 2), Memory())
RESIDUALS = (LeftOver("e" * 64, "INT4", Residual(np.array([0.5, -1.25], np.float32))), None)


def test_a_state_survives_json_without_what_was_outstanding() -> None:
    saved = parse_saved(json.loads(json.dumps(saved_json(RUN.id, STATE, MEMORIES, RESIDUALS))))
    assert saved.run == RUN.id and saved.memories == MEMORIES
    first, second = saved.residuals
    assert second is None and first is not None and (first.record, first.codec) == ("e" * 64, "INT4")
    assert first.residual.values is not None and first.residual.values.tolist() == [0.5, -1.25]
    assert saved.state == replace(STATE, tracks=tuple(replace(track, outstanding=None) for track in STATE.tracks))


def test_fragments_whose_head_stands_keep_their_counters_and_others_start_anew() -> None:
    moved = replace(HEADS[1], version=4, digest="f" * 64, due=90, newest_step=70)
    state = resumed(parse_saved(saved_json(RUN.id, STATE, MEMORIES, RESIDUALS)).state, [HEADS[0], moved])
    assert state.tracks[0] == Track(0, HEADS[0].digest, HEADS[0].due, 3, 24, inherited=80)
    assert state.tracks[1] == Track(4, "f" * 64, 90, 13, 104)
    assert kept(STATE, [HEADS[0], moved]) == {0}
    assert state.global_step == 70, "the clock jumps forward to the newest commit's"


def test_the_ledger_goes_on_where_the_checkpoint_was_taken() -> None:
    moved = replace(HEADS[1], version=4, digest="f" * 64)
    state = resumed(parse_saved(saved_json(RUN.id, STATE, MEMORIES, RESIDUALS)).state, [HEADS[0], moved], {1: 72})
    assert state.books == (Account(24), Account(80, (("late", 16), ("restarted", 8))))
    assert all(book.balanced for book in books(state))
    unknown = resumed(parse_saved(saved_json(RUN.id, STATE, MEMORIES, RESIDUALS)).state, [HEADS[0], moved])
    assert unknown.books[1] == Account(8, (("late", 16), ("restarted", 80)))


def test_the_clock_never_goes_back() -> None:
    assert resumed(STATE, HEADS).global_step == 20


@pytest.mark.parametrize(
    "change",
    [
        {"run": 5},
        {"local_step": -1},
        {"tracks": [{}]},
        {"version": 99},
        {"tokens": "7"},
        {"tracks": None},
        {"books": []},
    ],
)
def test_anything_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="no state of a session"):
        parse_saved(saved_json(RUN.id, STATE, MEMORIES, RESIDUALS) | change)
