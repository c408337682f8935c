"""Questions to the store come when something is due, at growing gaps, and nothing is asked while nothing is due."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.engine.polling import (
    LEAST_GAP,
    barrier_gap,
    commit_expected_at,
    commit_gap,
    overdue_after,
    own_upload_after,
    probable_commit,
    snapshot_gap,
    snapshots_expected_at,
    unknown_gap,
    usual_lag,
)
from gradientmail_core.protocol.records import Estimates
from tests.core.engine.parts import first_head, run_of

RUN = run_of()
NO_TIME = -float("inf")


@given(st.integers(0, 10**6), st.none() | st.floats(-10, 1e7), st.none() | st.floats(0, 1e6))
@settings(deadline=None)
def test_no_gap_is_so_small_that_a_node_hammers_the_store(
    attempts: int, interval: float | None, grace: float | None
) -> None:
    assert commit_gap(attempts, interval) >= LEAST_GAP
    assert snapshot_gap(attempts, interval, grace) >= LEAST_GAP
    assert 0.1 <= unknown_gap(attempts) <= 1.0


@given(st.floats(1, 1e6))
@settings(deadline=None)
def test_gaps_double_up_to_a_quarter_of_the_cycle(interval: float) -> None:
    gaps = [commit_gap(attempts, interval) for attempts in range(30)]
    assert gaps[0] == min(0.25, interval / 16)
    assert all(later in (pytest.approx(2 * gap), pytest.approx(interval / 4)) for gap, later in pairwise(gaps))
    assert gaps[-1] == interval / 4


def test_a_late_commit_costs_questions_as_the_logarithm_of_its_lateness() -> None:
    def questions(until: float) -> int:
        late, asked = 0.0, 0
        while late < until:
            late, asked = late + commit_gap(asked, 0.5, late), asked + 1
        return asked

    assert commit_gap(9, 0.5, 0.4) == commit_gap(9, 0.5) == 0.125
    assert commit_gap(9, 0.5, 4.0) == 1.0
    assert questions(32.0) <= 27  # a quarter of the cycle for ever makes 256
    assert questions(320.0) - questions(32.0) <= 11


def test_a_running_grace_is_watched_closely() -> None:
    assert snapshot_gap(5, 100.0, None) == 8.0
    assert snapshot_gap(5, 100.0, 2.0) == 0.5
    assert snapshot_gap(0, None, 0.2) == 0.05


def test_a_commit_is_expected_one_interval_after_the_last() -> None:
    head = first_head(RUN, now=50.0, interval=10.0)
    assert commit_expected_at(head, None, 20.0) == 60.0
    assert commit_expected_at(head, 55.0, 20.0) == 60.0


def test_after_an_outage_it_is_expected_soon_after_the_own_snapshot_although_the_last_took_long() -> None:
    head = first_head(RUN, now=50.0, interval=600.0)
    assert commit_expected_at(head, None, 20.0) == 650.0
    assert commit_expected_at(head, 55.0, 20.0) == 75.0
    assert commit_expected_at(head, 45.0, 20.0) == 70.0


def test_in_the_first_cycle_it_is_expected_soon_after_the_own_snapshot() -> None:
    head = first_head(RUN, now=50.0)
    assert commit_expected_at(head, 55.0, 20.0) == pytest.approx(55.1)
    assert commit_expected_at(head, None, 20.0) == 70.0


@pytest.mark.parametrize(
    ("interval", "published_at", "listed", "expected"),
    [
        (10.0, None, False, 58.5),
        (10.0, 53.0, False, 53.5),
        (10.0, 59.0, False, 58.5),
        (None, None, False, 70.0),
        (None, 55.0, False, 55.0),
        (10.0, 53.0, True, 50.0),
    ],
)
def test_snapshots_are_expected_before_the_commit(
    interval: float | None, published_at: float | None, listed: bool, expected: float
) -> None:
    head = first_head(RUN, now=50.0, interval=interval, estimates=Estimates(quorum=1.5, sync=0.5))
    assert snapshots_expected_at(head, published_at, listed, 20.0, lag=0.5) == pytest.approx(expected)


def test_the_lag_follows_what_was_found_and_shrinks_while_the_first_question_finds_all() -> None:
    assert usual_lag(0.0, 3, found_after=2.0, asked_after=1.0) == pytest.approx(0.75)
    assert usual_lag(0.8, 1, found_after=0.8, asked_after=NO_TIME) == pytest.approx(0.72)
    assert usual_lag(1.0, 2, found_after=0.5, asked_after=-3.0) == pytest.approx(0.625)


def test_a_closer_keeps_its_own_snapshot_back_for_a_usual_closing() -> None:
    assert own_upload_after(first_head(RUN)) is None
    assert own_upload_after(first_head(RUN, estimates=Estimates(sync=0.1))) == 2.0
    assert own_upload_after(first_head(RUN, estimates=Estimates(quorum=1.0, grace=2.0, sync=1.0))) == 6.0


def test_a_commit_that_was_found_lies_between_two_questions() -> None:
    assert probable_commit(100.0, 99.0, 10.0) == 99.5
    assert probable_commit(100.0, 50.0, 10.0) == 99.0, "never more than a second ago"


def test_a_commit_that_was_there_at_once_came_a_little_earlier() -> None:
    assert probable_commit(100.0, NO_TIME, 8.0) == pytest.approx(99.5)
    assert probable_commit(100.0, NO_TIME, None) == pytest.approx(100.0 - LEAST_GAP)


@pytest.mark.parametrize(
    ("estimates", "lease", "expected"),
    [
        (Estimates(), 120.0, 120.0),
        (Estimates(quorum=4.0, grace=5.0), 120.0, 120.0),
        (Estimates(quorum=4.0, grace=5.0, sync=1.0), 120.0, 30.0),
        (Estimates(quorum=0.1, sync=0.1), 120.0, 5.0),
        (Estimates(quorum=40.0, sync=1.0), 120.0, 60.0),
        (Estimates(quorum=0.1, sync=0.1), 6.0, 3.0),
    ],
)
def test_a_round_is_overdue_after_three_usual_closings(estimates: Estimates, lease: float, expected: float) -> None:
    assert overdue_after(first_head(RUN, estimates=estimates), lease) == pytest.approx(expected)


def test_who_stands_still_asks_at_growing_gaps_so_that_little_is_lost_and_little_asked() -> None:
    waited, questions = 0.0, 0
    while waited < 10.0:
        waited, questions = waited + barrier_gap(waited), questions + 1
    assert questions < 20 and barrier_gap(4.0) == pytest.approx(2.0)
