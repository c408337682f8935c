"""Shares of a batch: they add up, follow speed, and do not flap."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientmail_core.algorithms.shares import as_seen, divided, settled
from gradientmail_core.protocol.records import Share

NAMES = st.text("abcdef", min_size=1, max_size=3)
SPEEDS = st.dictionaries(NAMES, st.just(0.0) | st.floats(1e-3, 1e6), min_size=1, max_size=8)


@given(st.integers(1, 5000), SPEEDS)
def test_parts_are_whole_add_up_and_leave_nobody_out(whole: int, speeds: dict[str, float]) -> None:
    parts = divided(whole, speeds)
    assert parts.keys() == speeds.keys() and min(parts.values()) >= 1
    assert sum(parts.values()) == max(whole, len(speeds))
    assert divided(whole, dict(reversed(speeds.items()))) == parts


def test_parts_are_in_proportion_to_speed_and_the_unknown_is_usual() -> None:
    assert divided(103, {"a": 10.0, "b": 30.0, "c": 60.0}) == {"a": 11, "b": 31, "c": 61}
    assert divided(63, {"a": 10.0, "b": 30.0, "new": 0.0}) == {"a": 11, "b": 31, "new": 21}
    assert divided(10, {"a": 0.0, "b": 0.0, "c": 0.0}) == {"a": 4, "b": 3, "c": 3}


def test_noise_of_a_tenth_moves_no_share() -> None:
    noise, shares = random.Random(0), settled(120, (), {"a": 10.0, "b": 20.0}, ("a", "b"))
    assert {share.node: share.samples for share in shares} == {"a": 40, "b": 80}
    for _ in range(200):
        measured = {"a": 10.0 * noise.uniform(0.9, 1.1), "b": 20.0 * noise.uniform(0.9, 1.1)}
        newer = settled(120, shares, measured, ("a", "b"))
        assert [share.samples for share in newer] == [40, 80]
        shares = newer


def test_a_node_that_becomes_twice_as_fast_has_its_share_in_a_few_rounds_and_then_keeps_it() -> None:
    shares = settled(120, (), {"a": 10.0, "b": 10.0}, ("a", "b"))
    seen = []
    for _ in range(30):
        shares = settled(120, shares, {"a": 20.0, "b": 10.0}, ("a", "b"))
        seen.append(shares[0].samples)
    assert seen[0] > 60 and abs(seen[-1] - 80) <= 8 and len(set(seen)) <= 4
    assert seen == sorted(seen)


def test_who_comes_and_goes_changes_every_share_at_once() -> None:
    shares = settled(90, (), {"a": 10.0, "b": 20.0}, ("a", "b"))
    assert [share.samples for share in settled(90, shares, {}, ("a", "b", "c"))] == [20, 40, 30]
    assert [share.samples for share in settled(90, shares, {}, ("b",))] == [90]


@pytest.mark.parametrize("live", [("a", "b"), ("a", "b", "c"), ("a",), ("c", "d")])
def test_on_every_view_of_who_lives_the_shares_add_up(live: tuple[str, ...]) -> None:
    shares = (Share("a", 31, 10.0), Share("b", 59, 20.0))
    parts = as_seen(90, shares, live)
    assert parts.keys() == set(live) and sum(parts.values()) == 90
    assert live != ("a", "b") or parts == {"a": 31, "b": 59}
