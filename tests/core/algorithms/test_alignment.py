"""Each alignment computes its formula, in place too, and keeps the counters it should."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.algorithms.alignment import (
    Adaptive,
    Alignment,
    Arrival,
    Blend,
    Carry,
    Eager,
    Kept,
    LastRound,
    Mode,
    Overwrite,
    adapted,
    align,
    provisional,
    reads_live,
    taken,
)
from gradientmail_core.algorithms.outer import Nesterov
from gradientmail_core.tensors.model import Flat

SIZE = 150_001
ON, OFF = Mode(carrying=True), Mode(carrying=False)


def flat(seed: int) -> Flat:
    """Values a model might hold."""
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def arrival(merged: bool = True) -> Arrival:
    """A commit, live parameters, their base and the snapshot, all different."""
    return Arrival(commit=flat(0), live=flat(1), base=flat(2), anchor=flat(3), merged=merged)


def outcome(alignment: Alignment, at: Arrival, *, rebase: bool = False, mode: Mode = OFF) -> tuple[Flat, Kept]:
    out = np.full(SIZE, np.nan, np.float32)
    kept = align(alignment, at, out, rebase=rebase, mode=mode)
    in_place = at.live.copy()
    align(alignment, Arrival(at.commit, in_place, at.base, at.anchor, at.merged), in_place, rebase=rebase, mode=mode)
    assert in_place.tobytes() == out.tobytes()
    return out, kept


@pytest.mark.parametrize("alignment", [Overwrite(), Adaptive(), Blend(0.0)], ids=repr)
@pytest.mark.parametrize("merged", [True, False])
def test_overwriting_takes_the_commit_and_drops_the_counters(alignment: Alignment, merged: bool) -> None:
    at = arrival(merged)
    out, kept = outcome(alignment, at)
    assert out.tobytes() == at.commit.tobytes()
    assert kept is Kept.NOTHING


@pytest.mark.parametrize("merged", [True, False])
def test_blend_mixes(merged: bool) -> None:
    at = arrival(merged)
    out, kept = outcome(Blend(0.25), at)
    np.testing.assert_allclose(out, 0.25 * at.live + 0.75 * at.commit, atol=1e-6)
    assert kept is Kept.NOTHING


@pytest.mark.parametrize(("alignment", "mode"), [(Carry(), OFF), (Eager(), OFF), (Adaptive(), ON)])
def test_carrying_keeps_the_steps_since_the_snapshot(alignment: Alignment, mode: Mode) -> None:
    at = arrival()
    assert at.anchor is not None
    out, kept = outcome(alignment, at, mode=mode)
    np.testing.assert_allclose(out, at.commit + (at.live - at.anchor), atol=1e-6)
    assert kept is Kept.SINCE_SNAPSHOT
    assert kept.of(trained=10, since_snapshot=3) == 3


@pytest.mark.parametrize(("alignment", "mode"), [(Carry(), OFF), (Eager(), OFF), (Adaptive(), ON)])
def test_carrying_overwrites_when_the_snapshot_was_not_merged(alignment: Alignment, mode: Mode) -> None:
    at = arrival(merged=False)
    out, kept = outcome(alignment, at, mode=mode)
    assert out.tobytes() == at.commit.tobytes()
    assert kept.of(trained=10, since_snapshot=3) == 0


@pytest.mark.parametrize("alignment", [Overwrite(), Blend(), Carry(), Adaptive(), Eager()], ids=repr)
def test_rebase_keeps_all_progress_of_a_snapshot_that_was_not_merged(alignment: Alignment) -> None:
    at = arrival(merged=False)
    out, kept = outcome(alignment, at, rebase=True)
    np.testing.assert_allclose(out, at.commit + (at.live - at.base), atol=1e-6)
    assert kept.of(trained=10, since_snapshot=3) == 10
    merged = arrival()
    assert outcome(alignment, merged, rebase=True)[0].tobytes() == outcome(alignment, merged)[0].tobytes()


def test_only_overwriting_needs_no_look_at_the_model() -> None:
    assert not reads_live(Overwrite(), rebase=False)
    assert reads_live(Overwrite(), rebase=True)
    assert all(reads_live(alignment, rebase=False) for alignment in (Blend(), Carry(), Adaptive(), Eager()))


def test_adaptive_switches_with_hysteresis() -> None:
    rule, mode, seen = Adaptive(high=0.6, low=0.4, hysteresis=2), Mode(), []
    for cosine in (0.7, 0.5, 0.7, None, 0.6, 0.5, 0.4, 0.41, 0.3, 0.2, 0.9):
        mode = adapted(rule, mode, cosine)
        seen.append(mode.carrying)
    assert seen == [False, False, False, False, True, True, True, True, True, False, False]


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(-1, 1)), max_size=30))
def test_adaptive_never_switches_between_its_borders(cosines: list[float | None]) -> None:
    rule, mode = Adaptive(high=0.6, low=0.4), Mode()
    for cosine in cosines:
        moved = adapted(rule, mode, cosine)
        if cosine is None or rule.low < cosine < rule.high:
            assert moved.carrying == mode.carrying
        mode = moved


def test_a_lone_eager_node_is_never_jolted() -> None:
    outer, base, state = Nesterov(), flat(0), (flat(1),)
    own_last, delta, snapshot = flat(2), flat(3), flat(4)
    last = LastRound(delta=own_last, own=own_last, weight=1.0)
    guess = provisional(outer, base, state, 7, delta, last)
    commit, buffer = base.copy(), (state[0].copy(),)
    outer.step(commit, delta, buffer, 7)
    np.testing.assert_allclose(guess, commit, atol=1e-5)
    assert state[0].tobytes() == flat(1).tobytes()
    assert base.tobytes() == flat(0).tobytes()

    live = snapshot.copy()
    taken(live, snapshot, guess, live)
    np.testing.assert_allclose(live, guess, atol=1e-6)
    corrected = np.empty_like(live)
    align(Eager(), Arrival(commit, live, base, guess, merged=True), corrected)
    np.testing.assert_allclose(corrected, live, atol=1e-5)


def test_the_guess_swaps_the_own_term_at_its_weight() -> None:
    base, merged_last, own_last, delta = flat(0), flat(1), flat(2), flat(3)
    guess = provisional(
        Nesterov(warmup=0.0, momentum=0.0, lr=1.0),
        base,
        (np.zeros_like(base),),
        2,
        delta,
        LastRound(merged_last, own_last, 0.25),
    )
    np.testing.assert_allclose(guess, base - (merged_last + 0.25 * (delta - own_last)), atol=1e-5)
