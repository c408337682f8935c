"""When a round closes and with whom: quorum, grace, outliers, shares, and the timings it leaves behind."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.gathering import (
    BLEND,
    Accepted,
    Gathering,
    blended,
    closes_at,
    grace_seconds,
    reached,
    shares,
    sound,
    speeds,
    step_seconds,
    with_accepted,
    with_quorum,
    with_refused,
    without_outliers,
)
from gradientmail_core.protocol.records import Estimates, Refusal, SnapshotRecord
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.encoded import InMemory
from tests.core.engine.parts import INCARNATION

DELTA = InMemory(codec_named("F32"), [np.zeros(4, np.uint8)])
SETTINGS = DiLoCo(sync_every=20, fragments=2, grace_seconds=3.0)


def snapshot(
    node: str = "a", *, pace: float = 1.0, steps: int = 16, tokens: int = 160, seconds: float = 0.5, early: bool = False
) -> Accepted:
    record = SnapshotRecord(
        run="5a", round=2, node=node, incarnation=INCARNATION, base="1" * 64, data="2" * 64, codec="F32",
        steps=steps, tokens=tokens, local_step=20, step_seconds=seconds, early=early,
    )  # fmt: skip
    return Accepted(record, node * 64, DELTA, pace * math.sqrt(steps))


def refusal(node: str = "z") -> Refusal:
    return Refusal(node, INCARNATION, "4" * 64, "stale")


def gathered(*snapshots: Accepted, now: float = 10.0) -> Gathering:
    gathering = Gathering()
    for one in snapshots:
        gathering = with_accepted(gathering, one, now)
    return gathering


# -- quorum and the end ------------------------------------------------------------------------------------


def test_who_has_just_joined_weighs_less_for_so_many_rounds() -> None:
    fresh, old = snapshot("a"), snapshot("b")
    aged = [replace(fresh, record=replace(fresh.record, age=age)) for age in (0, 1, 2, 3)]
    seasoned = replace(old, record=replace(old.record, age=1000))
    assert [shares([one, seasoned], 2)[0] for one in aged] == pytest.approx([1 / 4, 2 / 5, 1 / 2, 1 / 2])
    assert shares([aged[0], seasoned]) == (0.5, 0.5), "without a ramp"
    assert shares([aged[0], aged[0]], 2) == (0.5, 0.5), "where all are new"


def test_speeds_are_samples_per_second_of_who_timed_its_steps() -> None:
    timed, untimed = snapshot("a", steps=16, tokens=160, seconds=0.5), snapshot("b", seconds=0.0)
    assert speeds([timed, untimed]) == {"a": 20.0}


def test_the_first_snapshot_starts_the_round() -> None:
    gathering = with_accepted(gathered(snapshot("a"), now=10.0), snapshot("b"), 12.0)
    assert gathering.first_at == 10.0 and gathering.heard == {"a", "b"}
    assert Gathering().first_at is None
    assert with_refused(Gathering(), refusal()).first_at is None


def test_quorum_is_noted_once_when_there_are_enough() -> None:
    gathering = gathered(snapshot("a"), snapshot("b"))
    assert with_quorum(gathering, 3, 11.0, 0.0).quorum_at is None
    gathering = with_quorum(gathering, 2, 11.0, 0.0)
    assert gathering.quorum_at == 11.0
    assert with_quorum(gathering, 2, 15.0, 0.0).quorum_at == 11.0


def test_the_refused_make_no_quorum() -> None:
    gathering = with_refused(gathered(snapshot("a")), refusal())
    assert with_quorum(gathering, 2, 11.0, 0.0).quorum_at is None


def test_early_ones_make_no_quorum_before_the_round_is_expected() -> None:
    early = gathered(snapshot("a", early=True), snapshot("b", early=True))
    assert with_quorum(early, 2, 19.9, 20.0).quorum_at is None
    assert with_quorum(early, 2, 20.0, 20.0).quorum_at == 20.0
    joined = with_accepted(early, snapshot("c"), 12.0)
    assert with_quorum(joined, 2, 12.0, 20.0).quorum_at == 12.0


def test_outliers_make_no_quorum_and_leave_nobody_out() -> None:
    usual, version = Estimates(norm=1.0), 10
    wild, one, two = snapshot("d", pace=1e4), snapshot("a"), snapshot("b")
    assert sound(gathered(wild), version, usual) == ()
    assert sound(gathered(wild, one), version, usual) == (one,)
    assert sound(gathered(wild, one, two), version, usual) == (one, two)
    assert sound(gathered(wild), 3, usual) == (wild,), "a chain's first rounds know none"
    waiting = gathered(wild)
    waiting = with_quorum(waiting, 1, 11.0, 0.0, sound(waiting, version, usual))
    assert waiting.quorum_at is None
    assert closes_at(waiting, {"d"}, SETTINGS, usual) == -math.inf, "nobody else can come"
    both = with_accepted(waiting, one, 12.0)
    assert with_quorum(both, 1, 12.0, 0.0, sound(both, version, usual)).quorum_at == 12.0


def test_a_round_waits_for_quorum_and_then_for_the_grace() -> None:
    gathering = gathered(snapshot("a"))
    assert closes_at(gathering, {"a", "b", "c"}, SETTINGS, Estimates()) is None
    assert closes_at(Gathering(), {"a"}, SETTINGS, Estimates()) is None
    quorum = with_quorum(gathering, 1, 11.0, 0.0)
    assert closes_at(quorum, {"a", "b", "c"}, SETTINGS, Estimates()) == 14.0


@pytest.mark.parametrize("live", [{"a"}, {"a", "b"}, {"b"}, set()])
def test_it_closes_at_once_when_everybody_has_reported(live: set[str]) -> None:
    gathering = gathered(snapshot("a"), snapshot("b"))
    assert closes_at(gathering, live, SETTINGS, Estimates()) == -math.inf


def test_refusals_are_reports_too() -> None:
    gathering = with_refused(Gathering(), refusal("a"))
    assert closes_at(gathering, {"a"}, SETTINGS, Estimates()) == -math.inf
    assert closes_at(gathering, {"a", "b"}, SETTINGS, Estimates()) is None


def test_without_anybody_heard_nothing_closes() -> None:
    assert closes_at(Gathering(), set(), SETTINGS, Estimates()) is None


# -- the round clock ---------------------------------------------------------------------------------------


def clocked(node: str, clock: int, *, final: bool = False) -> Accepted:
    one = snapshot(node)
    return replace(one, record=replace(one.record, clock=clock, final=final))


@pytest.mark.parametrize(
    ("overlap", "now", "expected"),
    [(None, 10.0, 90), (None, 10.9, 91), (None, 16.0, 102), (None, 99.0, 110), (None, 5.0, 90), (3, 16.0, 93)],
)
def test_the_fastest_node_trains_on_while_its_snapshot_lies_there(
    overlap: int | None, now: float, expected: int
) -> None:
    gathering = gathered(clocked("a", 80), clocked("b", 90), now=10.0)
    assert reached(gathering, replace(SETTINGS, overlap_steps=overlap), Estimates(), now) == expected


def test_who_leaves_trains_no_more() -> None:
    gathering = gathered(clocked("a", 80), clocked("b", 90, final=True), now=10.0)
    assert reached(gathering, SETTINGS, Estimates(), 13.0) == 90
    assert reached(gathering, SETTINGS, Estimates(), 17.0) == 94


def test_without_timed_steps_a_clock_counts_as_it_was() -> None:
    untimed = gathered(snapshot("a", seconds=0.0))
    assert reached(untimed, SETTINGS, Estimates(), 50.0) == 0
    assert reached(Gathering(), SETTINGS, Estimates(step=0.5), 50.0) == 0


# -- grace -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_flight", "overlap", "step", "closing", "expected"),
    [
        (2, None, 0.5, 2.0, 4.0),  # ahead 20 steps are 10 s, less 2 s, halved
        (4, None, 0.5, 2.0, 5.0),  # half of 18 s is more than one gap of 5 s
        (2, 10, 0.5, 2.0, 1.5),  # overlap bounds what is ahead
        (2, None, 0.5, 30.0, 0.0),  # closing takes longer than what is ahead
        (2, 0, 0.5, 0.0, 0.0),  # a barrier leaves no slack
        (2, None, 0.0, 0.0, 0.0),  # nobody has timed a step
    ],
)
def test_adaptive_grace(in_flight: int, overlap: int | None, step: float, closing: float, expected: float) -> None:
    settings = DiLoCo(sync_every=40, fragments=4, in_flight=in_flight, overlap_steps=overlap)
    estimates = Estimates(quorum=closing / 2, sync=closing / 2)
    assert grace_seconds(settings, estimates, step) == pytest.approx(expected)


def test_a_set_grace_is_taken_as_it_is() -> None:
    assert grace_seconds(SETTINGS, Estimates(quorum=100.0), 7.0) == 3.0
    assert grace_seconds(replace(SETTINGS, grace_seconds=0.0), Estimates(), 7.0) == 0.0


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 999), st.integers(1, 8))
@settings(deadline=None)
def test_grace_is_finite_and_at_most_one_gap(step: float, quorum: float, sync: float, every: int, flight: int) -> None:
    settings = DiLoCo(sync_every=every, fragments=1, in_flight=flight)
    grace = grace_seconds(settings, Estimates(quorum=quorum, sync=sync), step)
    assert 0.0 <= grace <= every * step and math.isfinite(grace)


def test_the_rounds_step_time_is_the_median_of_those_who_know_theirs() -> None:
    known = gathered(snapshot("a", seconds=0.0), snapshot("b", seconds=1.0), snapshot("c", seconds=9.0))
    assert step_seconds(known, Estimates(step=7.0)) == 5.0
    assert step_seconds(gathered(snapshot("a", seconds=0.0)), Estimates(step=7.0)) == 7.0
    assert step_seconds(Gathering(), Estimates(step=7.0)) == 7.0


# -- outliers ----------------------------------------------------------------------------------------------


def judge(*paces: float, version: int = 9, norm: float = 1.0, theta_norm: float = math.inf) -> list[str]:
    """Names (a, b, c ...) of those kept."""
    gathering = gathered(*(snapshot(chr(97 + index), pace=pace) for index, pace in enumerate(paces)))
    judged = without_outliers(gathering, version, Estimates(norm=norm), theta_norm)
    kept = [one.record.node for one in judged.accepted]
    out = [one.node for one in judged.refused]
    assert sorted(kept + out) == sorted(one.record.node for one in gathering.accepted)
    assert all(one.reason == "outlier" for one in judged.refused)
    assert judged.heard == gathering.heard
    return kept


@pytest.mark.parametrize(
    ("paces", "norm", "kept"),
    [
        ((1.0, 1.0, 1.0, 10.0), 0.001, "abcd"),  # exactly ten times the median stays
        ((1.0, 1.0, 1.0, 10.1), 100.0, "abc"),  # with four, the median counts and not the chain
        ((50.0, 50.0, 50.0, 50.0), 1.0, "abcd"),
        ((1.0, 1.0, 1.0, 1.0, 99.0, 99.0), 1.0, "abcd"),
        ((1.0, 1.0, 11.0), 1.0, "ab"),  # with fewer, the chain's average counts
        ((1.0, 11.0), 1.0, "a"),
        ((11.0, 1.0), 1.0, "b"),
        ((11.0, 12.0), 1.0, "ab"),  # never all of them
        ((11.0, 12.0, 13.0), 1.0, "abc"),
        ((11.0,), 1.0, "a"),  # never the only one
        ((1.0, 11.0), 0.0, "ab"),  # the chain knows no average
        ((0.0, 0.0, 0.0, 0.0, 5.0), 1.0, "abcde"),  # the median is zero
    ],
)
def test_outliers(paces: tuple[float, ...], norm: float, kept: str) -> None:
    assert judge(*paces, norm=norm) == list(kept)


@pytest.mark.parametrize(("version", "kept"), [(1, "ab"), (2, "ab"), (3, "ab"), (4, "a")])
def test_a_chains_first_three_rounds_know_no_usual_norm(version: int, kept: str) -> None:
    assert judge(1.0, 99.0, version=version) == list(kept)


@pytest.mark.parametrize(
    ("paces", "theta_norm", "kept"),
    [
        ((1.0, 1001.0), 10.0, "a"),
        ((1001.0, 1.0), 10.0, "b"),
        ((1.0, 1000.0), 10.0, "ab"),  # exactly a thousand times the other stays
        ((1.0, 1001.0), 1e9, "ab"),  # next to nothing was trained by "a": "b" moves less than the parameters' length
        ((0.0, 1001.0), 10.0, "ab"),  # nothing was trained by "a"
        ((0.0, 1.0, 1001.0), 10.0, "ab"),
        ((1.0, 2.0, 1e6, 1e6), 10.0, "ab"),  # the lower median of the others
        ((1e6, 2e6), 10.0, "ab"),  # never all of them
        ((1e6,), 10.0, "a"),
    ],
)
def test_what_is_absurd_is_refused_from_the_first_round_on(
    paces: tuple[float, ...], theta_norm: float, kept: str
) -> None:
    assert judge(*paces, version=1, norm=0.0, theta_norm=theta_norm) == list(kept)


@pytest.mark.parametrize(("theta_norm", "counts"), [(0.004, True), (0.0039, False), (0.0, True)])
def test_a_lone_first_delta_a_thousand_times_the_parameters_makes_no_quorum(theta_norm: float, counts: bool) -> None:
    lone = snapshot("a", pace=1.0)
    assert sound(gathered(lone), 1, Estimates(), theta_norm) == ((lone,) if counts else ())


def test_a_long_round_is_no_outlier() -> None:
    long = snapshot("b", pace=1.0, steps=16 * 400)
    assert long.norm == 20 * snapshot("a").norm
    assert len(without_outliers(gathered(snapshot("a"), long), 9, Estimates(norm=1.0)).accepted) == 2


def test_earlier_refusals_stay() -> None:
    gathering = with_refused(gathered(snapshot("a"), snapshot("b", pace=99.0)), refusal())
    judged = without_outliers(gathering, 9, Estimates(norm=1.0))
    assert [(one.node, one.reason) for one in judged.refused] == [("z", "stale"), ("b", "outlier")]
    assert judged.refused[1].snapshot == "b" * 64


# -- shares ------------------------------------------------------------------------------------------------


def test_shares_are_quantity_times_quality() -> None:
    found = shares([snapshot("a", tokens=100, steps=10), snapshot("b", tokens=200, steps=10)])
    assert found == pytest.approx((0.2, 0.8))
    found = shares([snapshot("a", tokens=100, steps=10), snapshot("b", tokens=100, steps=20)])
    assert found == pytest.approx((2 / 3, 1 / 3))


def test_shares_without_tokens_are_equal() -> None:
    assert shares([snapshot("a", tokens=0), snapshot("b", tokens=0)]) == (0.5, 0.5)
    assert shares([]) == ()


def test_a_snapshot_without_tokens_does_not_break_the_round_for_others() -> None:
    idle, busy = shares([snapshot("a", tokens=0), snapshot("b", tokens=160)])
    assert 0.0 < idle < 1e-4 < busy < 1.0


TOKENS = st.sampled_from([0, 1, 2**53]) | st.integers(0, 2**53)
STEPS = st.sampled_from([1, 2**31]) | st.integers(1, 2**31)


@given(st.lists(st.tuples(TOKENS, STEPS), min_size=1, max_size=6))
@settings(deadline=None)
def test_every_share_is_a_weight_that_merges_take(claimed: list[tuple[int, int]]) -> None:
    found = shares([snapshot(tokens=tokens, steps=steps) for tokens, steps in claimed])
    assert all(0.0 < share <= 1.0 for share in found)
    assert math.fsum(found) == pytest.approx(1.0)


# -- estimates ---------------------------------------------------------------------------------------------


def test_first_timings_stand_as_they_are_and_later_ones_blend() -> None:
    gathering = with_quorum(gathered(snapshot("a", pace=3.0), now=10.0), 1, 12.0, 0.0)
    first = blended(Estimates(), gathering, grace=1.5, sync=4.0)
    assert first == Estimates(step=0.5, quorum=2.0, sync=4.0, grace=1.5, norm=3.0)
    second = blended(Estimates(1.0, 1.0, 1.0, 1.0, 1.0), gathering, grace=1.5, sync=4.0)
    assert second.step == pytest.approx(1 - 0.5 * BLEND)
    assert second.quorum == pytest.approx(1 + BLEND)
    assert second.sync == pytest.approx(1 + 3 * BLEND)
    assert second.norm == pytest.approx(1 + 2 * BLEND)
    assert second.grace == 1.5


def test_a_round_without_quorum_took_no_time_to_it() -> None:
    assert blended(Estimates(), gathered(snapshot("a")), grace=0.0, sync=1.0).quorum == 0.0


def test_a_quorum_noted_a_moment_before_its_snapshot_took_no_time_either() -> None:
    gathering = replace(gathered(snapshot("a"), now=10.0), quorum_at=9.998)
    assert blended(Estimates(), gathering, grace=0.0, sync=1.0).quorum == 0.0


def test_a_void_round_leaves_the_estimates_alone() -> None:
    void = Gathering(refused=(refusal(),), heard=frozenset("z"), first_at=10.0)
    old = Estimates(1.0, 2.0, 3.0, 4.0, 5.0)
    assert blended(old, void, grace=9.0, sync=9.0) == old
