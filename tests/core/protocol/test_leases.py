"""Life and progress are judged on the observer's clock, from what was seen and never from what is missing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.protocol.keys import LeaseKey, LeaseState
from gradientmail_core.protocol.leases import (
    Roster,
    Timeouts,
    evident,
    heard,
    is_alive,
    joining,
    live_closers,
    live_learners,
    observed,
)

TIMEOUTS = Timeouts(lease=120.0, progress=300.0)


def beat(node: str, number: int, state: LeaseState = "t", step: int = 0, tag: str = "0" * 16) -> LeaseKey:
    return LeaseKey(node, number, state, step, tag)


def seen(*beats: tuple[float, LeaseKey]) -> Roster:
    roster = Roster()
    for now, lease in beats:
        roster = observed(roster, [lease], now, TIMEOUTS)
    return roster


def test_a_beat_counts_from_when_it_was_first_seen_here() -> None:
    roster = seen((1000.0, beat("a", 0)), (1100.0, beat("a", 0)))
    assert live_learners(roster, 1119.0, TIMEOUTS) == ("a",)
    assert live_learners(roster, 1120.0, TIMEOUTS) == ()


def test_a_newer_beat_prolongs_life() -> None:
    roster = seen((0.0, beat("a", 0)), (100.0, beat("a", 1)))
    assert live_learners(roster, 219.0, TIMEOUTS) == ("a",)


def test_a_lease_that_vanishes_keeps_its_beat_and_age() -> None:
    roster = observed(seen((0.0, beat("a", 5))), [], 50.0, TIMEOUTS)
    assert roster.nodes["a"].lease.beat == 5
    assert live_learners(roster, 119.0, TIMEOUTS) == ("a",)
    assert live_learners(roster, 120.0, TIMEOUTS) == ()


def test_an_older_beat_changes_nothing() -> None:
    roster = seen((0.0, beat("a", 5, step=50)), (100.0, beat("a", 4, "x")))
    assert roster.nodes["a"].lease == beat("a", 5, step=50)
    assert not live_learners(roster, 120.0, TIMEOUTS)


def test_the_newest_of_several_listed_beats_counts() -> None:
    roster = observed(Roster(), [beat("a", 2), beat("a", 3, "x"), beat("a", 1)], 0.0, TIMEOUTS)
    assert not is_alive(roster.nodes["a"], 1.0, TIMEOUTS)


def test_leaving_is_an_act() -> None:
    roster = seen((0.0, beat("a", 0)), (1.0, beat("a", 1, "x")))
    assert not live_learners(roster, 1.0, TIMEOUTS) and not live_closers(roster, 1.0, TIMEOUTS)


def test_a_node_may_come_back_after_it_left() -> None:
    roster = seen((0.0, beat("a", 1, "x")), (500.0, beat("a", 2, "j", tag="1" * 16)), (501.0, beat("a", 3, "t")))
    assert live_learners(roster, 501.0, TIMEOUTS) == ("a",)


def test_a_node_that_was_buried_comes_back_with_beats_from_0() -> None:
    for gone in (beat("a", 50, "x"), beat("a", 50, "t")):
        roster = seen((0.0, gone), (500.0, beat("a", 0, "t", tag="1" * 16)))
        assert live_learners(roster, 501.0, TIMEOUTS) == ("a",)


def test_an_older_incarnation_does_not_replace_one_that_lives() -> None:
    roster = seen((0.0, beat("a", 50, tag="1" * 16)), (100.0, beat("a", 49, "x")))
    assert live_learners(roster, 101.0, TIMEOUTS) == ("a",)
    assert roster.nodes["a"].seen == 0.0


def test_an_old_beat_of_the_same_incarnation_raises_nobody() -> None:
    roster = seen((0.0, beat("a", 50, "x")), (500.0, beat("a", 49, "t")))
    assert not live_learners(roster, 501.0, TIMEOUTS)


def test_evidence_prolongs_life_and_progress() -> None:
    roster = evident(seen((0.0, beat("a", 0))), ["a"], 350.0)
    assert live_learners(roster, 469.0, TIMEOUTS) == ("a",)


def test_evidence_of_a_node_without_a_beat_is_no_member() -> None:
    assert evident(Roster(), ["ghost"], 1.0) == Roster()


def test_evidence_does_not_raise_who_left() -> None:
    roster = evident(seen((0.0, beat("a", 0, "x"))), ["a"], 1.0)
    assert not live_learners(roster, 1.0, TIMEOUTS)


def beating(state: LeaseState, steps: list[int]) -> Roster:
    return seen(*((100.0 * number, beat("a", number, state, step)) for number, step in enumerate(steps)))


def test_a_trainer_that_stands_still_is_alive_and_not_waited_for() -> None:
    roster = beating("t", [7, 7, 7, 7])
    assert live_learners(roster, 299.0, TIMEOUTS) == ("a",)
    assert live_learners(roster, 301.0, TIMEOUTS) == ()
    assert live_closers(roster, 301.0, TIMEOUTS) == ("a",)
    assert live_learners(observed(roster, [beat("a", 9, "t", 8)], 302.0, TIMEOUTS), 302.0, TIMEOUTS) == ("a",)


def test_only_training_needs_progress() -> None:
    assert live_learners(beating("w", [0, 0, 0, 0]), 301.0, TIMEOUTS) == ("a",)


def test_a_new_incarnation_is_progress() -> None:
    roster = observed(beating("t", [7, 7, 7]), [beat("a", 9, "t", 7, tag="1" * 16)], 300.0, TIMEOUTS)
    assert live_learners(roster, 310.0, TIMEOUTS) == ("a",)


@pytest.mark.parametrize(
    ("state", "learns", "closes", "joins"),
    [
        ("j", False, False, True),
        ("t", True, True, False),
        ("w", True, True, False),
        ("e", False, True, False),
        ("s", False, True, False),
        ("d", False, False, False),
        ("x", False, False, False),
    ],
)
def test_what_each_state_takes_part_in(state: LeaseState, learns: bool, closes: bool, joins: bool) -> None:
    roster = seen((0.0, beat("a", 0, state)))
    assert bool(live_learners(roster, 1.0, TIMEOUTS)) == learns
    assert bool(live_closers(roster, 1.0, TIMEOUTS)) == closes
    assert joining(roster, 1.0, TIMEOUTS) == joins


def test_while_a_syncer_lives_only_syncers_close() -> None:
    roster = seen((0.0, beat("a", 0)), (60.0, beat("b", 0)), (0.0, beat("s", 0, "s")))
    assert live_closers(roster, 61.0, TIMEOUTS) == ("s",)
    assert live_closers(roster, 121.0, TIMEOUTS) == ("b",)


def test_a_joiner_pins_payloads_for_ten_leases_at_most() -> None:
    roster = seen(*((20.0 * number, beat("a", number, "j")) for number in range(61)))
    assert joining(roster, 1199.0, TIMEOUTS)
    assert not joining(roster, 1201.0, TIMEOUTS)


def test_a_joiner_that_died_pins_for_two_leases() -> None:
    roster = seen((0.0, beat("a", 0, "j")))
    assert joining(roster, 239.0, TIMEOUTS)
    assert not joining(roster, 241.0, TIMEOUTS)


def test_names_come_in_order() -> None:
    roster = observed(Roster(), [beat(name, 0) for name in ("c", "a", "b")], 0.0, TIMEOUTS)
    assert live_learners(roster, 0.0, TIMEOUTS) == live_closers(roster, 0.0, TIMEOUTS) == ("a", "b", "c")


def test_a_roster_is_a_value() -> None:
    before = seen((0.0, beat("a", 0)))
    observed(before, [beat("b", 0)], 1.0, TIMEOUTS)
    evident(before, ["a"], 9.0)
    assert before == seen((0.0, beat("a", 0)))


STATES: list[LeaseState] = ["t", "w", "x"]
BEATS = st.lists(
    st.builds(
        beat, st.sampled_from(["a", "b"]), st.integers(0, 5), state=st.sampled_from(STATES), step=st.integers(0, 3)
    ),
    max_size=8,
)


@given(BEATS, st.floats(0, 1e6))
@settings(deadline=None)
def test_the_order_of_a_listing_means_nothing(beats: list[LeaseKey], now: float) -> None:
    unique = list({(lease.node, lease.beat): lease for lease in beats}.values())
    assert observed(Roster(), unique, now, TIMEOUTS) == observed(Roster(), reversed(unique), now, TIMEOUTS)


@given(BEATS, st.floats(0, 1e6), st.floats(0, 1e6))
@settings(deadline=None)
def test_only_differences_of_the_clock_matter(beats: list[LeaseKey], start: float, passed: float) -> None:
    ages = [
        {node: now - presence.seen for node, presence in observed(Roster(), beats, begin, TIMEOUTS).nodes.items()}
        for begin, now in ((0.0, passed), (start, start + passed))
    ]
    assert ages[0].keys() == ages[1].keys()
    assert all(abs(ages[0][node] - ages[1][node]) < 1e-6 for node in ages[0])


@pytest.mark.parametrize(("lease", "period"), [(120.0, 20.0), (1200.0, 200.0), (12.0, 2.0)])
def test_beat_and_listing_stay_under_a_third_of_the_lease(lease: float, period: float) -> None:
    timeouts = Timeouts(lease)
    assert timeouts.period == period and 2 * timeouts.period <= lease / 3


def test_closing_rounds_is_a_sign_of_life_and_not_of_training() -> None:
    lease = LeaseKey("a", 0, "t", 7, "0a" * 8)
    timeouts = Timeouts(lease=50.0, progress=30.0)
    roster = observed(Roster(), [lease], 0.0, timeouts)
    roster = heard(roster, ["a", "stranger"], 40.0)
    assert live_closers(roster, 80.0, timeouts) == ("a",)
    assert live_learners(roster, 80.0, timeouts) == ()
