"""A checkpoint's counters: what comes back, what starts anew, and what is refused."""

import json
from dataclasses import replace

import pytest

from gradientmail_core.engine.learner import LearnerState, Outstanding, Track
from gradientmail_core.engine.resuming import kept, parse_saved, resumed, saved_json
from gradientmail_core.errors import ConfigurationError
from tests.core.engine.parts import first_head, run_of

RUN = run_of()
HEADS = [first_head(RUN, fragment) for fragment in range(RUN.fragments)]
STATE = LearnerState(
    tracks=tuple(Track(head.version, head.digest, head.due, 3, 24, Outstanding(9)) for head in HEADS),
    local_step=13,
    tokens=104,
    lead=7,
    poisoned=1,
)


def test_a_state_survives_json_without_what_was_outstanding() -> None:
    saved = parse_saved(json.loads(json.dumps(saved_json(RUN.id, STATE))))
    assert saved.run == RUN.id
    assert saved.state == replace(STATE, tracks=tuple(replace(track, outstanding=None) for track in STATE.tracks))


def test_fragments_whose_head_stands_keep_their_counters_and_others_start_anew() -> None:
    moved = replace(HEADS[1], version=4, digest="f" * 64, due=90, newest_step=70)
    state = resumed(parse_saved(saved_json(RUN.id, STATE)).state, [HEADS[0], moved])
    assert state.tracks[0] == Track(0, HEADS[0].digest, HEADS[0].due, 3, 24)
    assert state.tracks[1] == Track(4, "f" * 64, 90, 13, 104)
    assert kept(STATE, [HEADS[0], moved]) == {0}
    assert state.global_step == 70, "the clock jumps forward to the newest commit's"


def test_the_clock_never_goes_back() -> None:
    assert resumed(STATE, HEADS).global_step == 20


@pytest.mark.parametrize(
    "change",
    [{"run": 5}, {"local_step": -1}, {"tracks": [{}]}, {"version": 99}, {"tokens": "7"}, {"tracks": None}],
)
def test_anything_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="no state of a session"):
        parse_saved(saved_json(RUN.id, STATE) | change)
