"""Removals under a joiner count once everybody must have seen it, and only of what it may be loading."""

import json

from gradientmail_core.protocol.keys import LeaseKey
from gradientmail_core.sim.pins import GAP_SECONDS, HELD_SECONDS, NOTICED_SECONDS, Pins

BLOB = "blobs/0000000004/a-00.safetensors"


def beat(pins: Pins, now: float, state: str = "j", tag: str = "0" * 16) -> None:
    pins.wrote(LeaseKey("z", int(now), state, 0, tag).path, b"{}", now)  # type: ignore[arg-type]  # a letter of a state


def commit(pins: Pins, round: int, now: float, key: str = "") -> None:
    body = json.dumps({"round": round, "sections": [{"key": key}] if key else []})
    pins.wrote(f"tape/{round:010d}-0", body.encode(), now)


def joined_by(seconds: float, step: float = 1.0, superseded: float = 3.0) -> Pins:
    """A joiner came at 1 s, beats for ``seconds``; fragment 0's version of round 4 is a head until ``superseded``."""
    pins = Pins(fragments=2)
    commit(pins, 4, 0.0, BLOB)
    now = 1.0
    while now <= 1.0 + seconds:
        beat(pins, now)
        now += step
    commit(pins, 6, superseded)
    return pins


def test_a_payload_removed_under_a_joiner_that_all_have_seen() -> None:
    now = NOTICED_SECONDS + 2.0
    assert joined_by(now).broken(BLOB, now) == "a payload of round 4 went that z may be loading"


def test_a_joiner_that_just_came_may_be_unknown() -> None:
    now = NOTICED_SECONDS / 2
    assert joined_by(now).broken(BLOB, now) is None


def test_a_joiner_whose_beats_had_a_gap_may_have_been_taken_for_dead() -> None:
    now = NOTICED_SECONDS + 2.0
    assert joined_by(now, step=GAP_SECONDS + 1.0).broken(BLOB, now) is None


def test_what_was_no_head_any_more_when_it_came_may_go() -> None:
    now = NOTICED_SECONDS + 2.0
    assert joined_by(now, superseded=0.5).broken(BLOB, now) is None


def test_payloads_no_record_names_may_go() -> None:
    now = NOTICED_SECONDS + 2.0
    assert joined_by(now).broken("blobs/0000000004/b-00.safetensors", now) is None


def test_who_has_joined_needs_nothing_and_a_late_beat_does_not_change_that() -> None:
    now = NOTICED_SECONDS + 2.0
    pins = joined_by(now)
    beat(pins, now, "t")
    beat(pins, now)
    assert pins.broken(BLOB, now) is None


def test_a_joiner_is_not_waited_for_for_ever() -> None:
    assert joined_by(HELD_SECONDS + 2.0).broken(BLOB, HELD_SECONDS + 1.5) is None


def test_since_when_somebody_joins_counts_while_a_beat_said_so_lately() -> None:
    pins = joined_by(10.0)
    beat(pins, 12.0, "t")
    assert (pins.joining_since(11.0), pins.joining_since(11.5)) == (1.0, float("inf"))
