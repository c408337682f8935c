"""A chain's head follows its records, and predicts the next commit from what the run itself timed."""

from dataclasses import replace
from typing import Any

import pytest

from gradientmail_core.engine.chain import SMOOTHING, Head, first_seen, genesis, predicted_interval, succeeded
from gradientmail_core.protocol.exchange import Decided
from gradientmail_core.protocol.records import Estimates, RoundRecord, Section, digest
from tests.core.engine.parts import first_head, record_after, run_of

RUN = run_of()


def decided(record: RoundRecord) -> Decided:
    return Decided(record, digest(record.encoded()))


def after(head: Head, now: float, **changes: Any) -> Head:
    return succeeded(head, decided(record_after(head, RUN, **changes)), RUN.fragments, now)


def test_version_0_is_the_manifest() -> None:
    head = genesis(RUN.manifest, RUN.digest, 1, 20, 5.0)
    assert (head.version, head.digest, head.step, head.due, head.closer) == (0, RUN.digest, 0, 20, "a")
    assert head.section("theta") == RUN.manifest.theta[1]
    assert head.section("outer") is None
    assert head.next_round(2) == 3
    assert (head.seen, head.interval, head.record) == (5.0, None, None)


def test_a_record_moves_the_head() -> None:
    record = record_after(first_head(RUN, 1), RUN, closer="b", newest_step=23, estimates=Estimates(norm=3.0))
    found = decided(record)
    head = succeeded(first_head(RUN, 1), found, 2, 9.0)
    assert (head.version, head.digest, head.record) == (1, found.digest, record)
    assert (head.step, head.due, head.closer, head.newest_step) == (20, 40, "b", 23)
    assert (head.merged_tokens, head.sections, head.estimates) == (160, record.sections, Estimates(norm=3.0))
    assert head.next_round(2) == 5
    assert head.seen == 9.0


def test_rounds_of_a_chain_are_one_for_each_version() -> None:
    head = first_head(RUN, 1)
    for version in range(1, 5):
        head = after(head, 10.0 * version)
        assert (head.version, head.next_round(2)) == (version, 2 * (version + 1) + 1)


def test_intervals_are_smoothed_until_somebody_times_a_step() -> None:
    first = after(first_head(RUN), 10.0)
    assert first.interval == 10.0
    second = after(first, 30.0)
    assert second.interval == pytest.approx(10.0 + SMOOTHING * 10.0)


def test_the_interval_of_a_jump_is_that_of_one_round() -> None:
    first = after(first_head(RUN), 10.0)
    later = record_after(replace(first, version=4), RUN)
    assert succeeded(first, decided(later), 2, 50.0).interval == pytest.approx(10.0)
    assert succeeded(first, decided(later), 2, 50.0).version == 5


def test_a_joiner_knows_no_interval_from_one_record() -> None:
    later = record_after(replace(first_head(RUN), version=4), RUN)
    assert succeeded(first_head(RUN), decided(later), 2, 50.0).interval is None


def test_timed_steps_predict_the_interval() -> None:
    timed = Estimates(step=0.5, quorum=1.0, sync=2.0)
    record = record_after(first_head(RUN), RUN, newest_step=14, estimates=timed)
    assert (record.step, record.next_step) == (10, 30)
    assert predicted_interval(record) == pytest.approx(16 * 0.5 + 3.0)
    assert succeeded(first_head(RUN), decided(record), 2, 10.0).interval == pytest.approx(11.0)
    assert predicted_interval(replace(record, estimates=Estimates(quorum=1.0))) is None


def test_a_follower_asks_no_later_than_commits_have_come() -> None:
    """A prediction that is too long by as much each time must not let it fall behind."""
    head = first_head(RUN)
    for version in range(1, 6):
        head = after(head, 10.0 * version, estimates=Estimates(step=0.6), next_step=30 + 20 * version)
    assert head.interval == pytest.approx(12.0)
    assert head.measured == pytest.approx(10.0) and head.asked_after == head.measured
    assert first_seen(head, 99.0).asked_after == head.interval, "a joiner has measured nothing yet"
    assert replace(head, interval=7.0).asked_after == 7.0


def test_a_record_whose_clock_ran_past_its_next_step_predicts_no_negative_time() -> None:
    record = record_after(first_head(RUN), RUN, newest_step=10**6, estimates=Estimates(step=0.5, sync=2.0))
    assert predicted_interval(record) == pytest.approx(2.0)


def test_a_joiners_intervals_begin_now() -> None:
    head = first_head(RUN, now=3.0)
    assert first_seen(head, 50.0) == replace(head, seen=50.0)


def test_sections_are_found_by_name() -> None:
    outer = Section("outer", RUN.manifest.theta[0].key, "0" * 64, "F32")
    head = replace(first_head(RUN), sections=(*RUN.manifest.theta[:1], outer))
    assert head.section("outer") == outer
