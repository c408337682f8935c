"""Merges are what their equations say and depend on nothing but the contributions."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.algorithms.merge import Contribution, Median, Merge, Rda, TrimmedMean, WeightedMean
from gradientmail_core.algorithms.outer import Adam, Nesterov
from gradientmail_core.tensors.kernels import BLOCK, SPAN
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Piece, Role

MERGES: list[Merge] = [
    WeightedMean(),
    Rda(),
    Rda(direct_roles=(), cancel="zero"),
    TrimmedMean(0.3),
    Median(),
    Rda(clip=1.0),
]

# Pieces that end inside blocks, share one, span several, and hold nothing.
PIECES: tuple[tuple[int, Role], ...] = (
    (70_001, "matrix"),
    (0, "matrix"),
    (3, "vector"),
    (60_000, "embedding"),
    (1, "matrix"),
    (2 * BLOCK, "matrix"),
)


def layout_of(pieces: Sequence[tuple[int, Role]] = PIECES) -> FragmentLayout:
    """Flat pieces back to back."""
    offsets = itertools.accumulate((size for size, _ in pieces), initial=0)
    return FragmentLayout(
        0, tuple(Piece(f"t{at}", (size,), at, role=role) for (size, role), at in zip(pieces, offsets, strict=False))
    )


LAYOUT = layout_of()


def copied(values: Flat, start: int, stop: int, out: Flat) -> Flat:
    """A reader of uncompressed values, strict about what it is asked for."""
    assert start % BLOCK == 0
    assert stop - start == out.size <= SPAN
    np.copyto(out, values[start:stop])
    return out


def contribution(node: str, values: Flat, weight: float = 1.0) -> Contribution:
    """A contribution of known values."""
    return Contribution(node, weight, partial(copied, values))


def deltas(count: int, seed: int = 0, size: int = LAYOUT.size) -> list[Flat]:
    """Values from -0.5 to 0.5, each delta with a scale of its own; drawn without transcendental functions."""
    rng = np.random.default_rng(seed)
    return [
        ((rng.random(size, dtype=np.float32) - np.float32(0.5)) * np.float32(1 + number)).astype(np.float32)
        for number in range(count)
    ]


def contributions(count: int, seed: int = 0) -> list[Contribution]:
    """Contributions of different weights."""
    return [contribution(f"node{n}", values, 1.0 + n) for n, values in enumerate(deltas(count, seed))]


def norm(values: Flat) -> float:
    """The l2 norm in fp64."""
    return float(np.linalg.norm(values.astype(np.float64)))


@pytest.mark.parametrize("merge", MERGES, ids=repr)
@settings(max_examples=5, deadline=None)
@given(st.data())
def test_order_of_arrival_moves_no_bit(merge: Merge, data: st.DataObject) -> None:
    given_ = contributions(data.draw(st.integers(1, 5)), data.draw(st.integers(0, 100)))
    order = data.draw(st.permutations(range(len(given_))))
    first, second = merge(given_, LAYOUT), merge([given_[index] for index in order], LAYOUT)
    assert first.delta.tobytes() == second.delta.tobytes()
    assert first.cosine == second.cosine
    assert second.norms == tuple(first.norms[index] for index in order)


@pytest.mark.parametrize("merge", MERGES, ids=repr)
def test_equal_deltas_merge_to_that_delta(merge: Merge) -> None:
    (values,) = deltas(1)
    merged = merge([contribution(f"node{n}", values, 0.1 + n) for n in range(5)], LAYOUT)
    np.testing.assert_allclose(merged.delta, values, rtol=1e-6, atol=1e-9)
    assert merged.cosine == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("merge", MERGES, ids=repr)
def test_a_lone_delta_comes_back_bit_for_bit(merge: Merge) -> None:
    (values,) = deltas(1)
    merged = merge([contribution("a", values, 0.3)], LAYOUT)
    np.testing.assert_array_equal(merged.delta, values)
    assert merged.cosine is None
    assert merged.norms == pytest.approx((norm(values),))


def test_the_weighted_mean_is_one() -> None:
    merged = WeightedMean()(contributions(4), LAYOUT)
    np.testing.assert_allclose(merged.delta, np.average(deltas(4), axis=0, weights=[1, 2, 3, 4]), rtol=1e-5, atol=1e-6)


def test_only_the_ratio_of_weights_matters() -> None:
    small = [contribution(f"node{n}", values, 1e-200 * (1 + n)) for n, values in enumerate(deltas(3))]
    large = [contribution(f"node{n}", values, 1e200 * (1 + n)) for n, values in enumerate(deltas(3))]
    np.testing.assert_allclose(Rda()(small, LAYOUT).delta, Rda()(large, LAYOUT).delta, rtol=1e-6)


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 6), st.integers(0, 100))
def test_rda_has_the_mean_norm_and_the_mean_direction_piece_by_piece(count: int, seed: int) -> None:
    values, weights = deltas(count, seed), np.arange(1.0, count + 1) / sum(range(1, count + 1))
    merged = Rda()(contributions(count, seed), LAYOUT).delta
    mean = np.average(values, axis=0, weights=weights)
    for piece in LAYOUT.pieces:
        span = slice(piece.offset, piece.offset + piece.elements)
        if piece.role == "matrix" and piece.elements > 1:
            lengths = [norm(part[span]) for part in values]
            direction = sum(w * part[span] / length for w, part, length in zip(weights, values, lengths, strict=True))
            assert norm(merged[span]) == pytest.approx(float(np.dot(weights, lengths)), rel=1e-5)
            expected = direction / np.linalg.norm(direction) * np.dot(weights, lengths)
            np.testing.assert_allclose(merged[span], expected, atol=1e-4)
        elif piece.role != "matrix":
            np.testing.assert_allclose(merged[span], mean[span], rtol=1e-5, atol=1e-6)


def test_rda_keeps_its_norm_where_the_mean_shrinks() -> None:
    equal = [contribution(f"node{n}", values / norm(values)) for n, values in enumerate(deltas(8))]
    one_piece = layout_of([(LAYOUT.size, "matrix")])
    assert norm(WeightedMean()(equal, one_piece).delta) == pytest.approx(8**-0.5, rel=0.01)
    assert norm(Rda()(equal, one_piece).delta) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(("cancel", "share"), [("mean", -0.5), ("zero", 0.0)])
def test_cancelling_directions_are_settled_as_asked(cancel: str, share: float) -> None:
    (values,) = deltas(1)
    opposed = [contribution("a", values), contribution("b", np.float32(-2.0) * values)]
    merge = Rda(direct_roles=(), cancel="mean" if cancel == "mean" else "zero")
    np.testing.assert_allclose(merge(opposed, LAYOUT).delta, share * values, atol=1e-6)
    only_first = values.copy()
    only_first[70_001:] *= -1
    mixed = merge([contribution("a", values), contribution("b", only_first)], LAYOUT).delta
    np.testing.assert_allclose(mixed[:70_001], values[:70_001], rtol=1e-6)
    np.testing.assert_array_equal(mixed[70_001:], 0.0)


def test_zero_deltas_merge_to_zero() -> None:
    nothing = [contribution(node, np.zeros(LAYOUT.size, np.float32)) for node in "abc"]
    for merge in MERGES:
        merged = merge(nothing, LAYOUT)
        np.testing.assert_array_equal(merged.delta, 0.0)
        assert merged.cosine is None


def test_a_zero_delta_among_others_has_no_direction() -> None:
    values, one_piece = deltas(2), layout_of([(LAYOUT.size, "matrix")])
    given_ = [contribution(f"node{n}", delta) for n, delta in enumerate([*values, np.zeros_like(values[0])])]
    merged = Rda()(given_, one_piece)
    assert norm(merged.delta) == pytest.approx((norm(values[0]) + norm(values[1])) / 3, rel=1e-5)
    assert merged.cosine == pytest.approx(cosine(values[0], values[1]), abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11])
def test_median_and_trimmed_mean_match_numpy(count: int) -> None:
    values = deltas(count)
    median = Median()(contributions(count), LAYOUT).delta
    np.testing.assert_allclose(median, np.median(values, axis=0), rtol=1e-6, atol=1e-7)
    cut = int(0.3 * count)
    trimmed = TrimmedMean(0.3)(contributions(count), LAYOUT).delta
    expected = np.sort(values, axis=0)[cut : count - cut].mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(trimmed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("merge", [TrimmedMean(0.25), Median()], ids=repr)
def test_order_statistics_stay_among_the_honest(merge: Merge) -> None:
    honest = deltas(3)
    attack = contribution("mallory", np.full(LAYOUT.size, 1e30, np.float32), weight=1e9)
    merged = merge([*(contribution(f"node{n}", values) for n, values in enumerate(honest)), attack], LAYOUT)
    assert (merged.delta <= np.max(honest, axis=0)).all()
    assert (merged.delta >= np.min(honest, axis=0)).all()


def test_clipping_bounds_a_norm_by_the_rounds_median() -> None:
    values = deltas(3)
    huge = 1e6 * values[0]
    given_ = [contribution(f"node{n}", delta) for n, delta in enumerate([*values, huge])]
    norms = sorted([*(norm(delta) for delta in values), norm(huge)])
    limit = 2.0 * (norms[1] + norms[2]) / 2
    factors = [min(1.0, limit / norm(delta)) for delta in [*values, huge]]
    expected = np.mean([factor * delta for factor, delta in zip(factors, [*values, huge], strict=True)], axis=0)
    merged = WeightedMean(clip=2.0)(given_, LAYOUT)
    np.testing.assert_allclose(merged.delta, expected, rtol=1e-4, atol=1e-5)
    assert max(merged.norms) == pytest.approx(norm(huge), rel=1e-6)
    assert norm(Rda(clip=2.0)(given_, LAYOUT).delta) < norm(Rda()(given_, LAYOUT).delta) / 1000


def cosine(a: Flat, b: Flat) -> float:
    """The cosine of two vectors in fp64."""
    return float(np.dot(a.astype(np.float64), b.astype(np.float64)) / norm(a) / norm(b))


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 6), st.integers(0, 100))
def test_the_cosine_is_the_mean_over_pairs(count: int, seed: int) -> None:
    values = deltas(count, seed)
    values = [delta + np.float32(0.2 * number) for number, delta in enumerate(values)]
    pairs = [cosine(a, b) for a, b in itertools.combinations(values, 2)]
    for merge in (WeightedMean(), Median()):
        merged = merge([contribution(f"node{n}", delta, 1.0 + n) for n, delta in enumerate(values)], LAYOUT)
        assert merged.cosine == pytest.approx(np.mean(pairs), abs=1e-5)


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 6), st.integers(0, 100))
def test_radial_averaging_tells_the_same_cosine_from_the_length_of_its_sum(count: int, seed: int) -> None:
    values = [delta + np.float32(0.2 * number) for number, delta in enumerate(deltas(count, seed))]
    pairs = [cosine(a, b) for a, b in itertools.combinations(values, 2)]
    whole = layout_of([(LAYOUT.size, "matrix")])
    for merge, layout in ((Rda(), whole), (Rda(clip=1.0), whole), (Rda(), LAYOUT)):
        merged = merge([contribution(f"node{n}", delta) for n, delta in enumerate(values)], layout)
        assert merged.cosine == pytest.approx(np.mean(pairs), abs=1e-5 if layout is whole else 0.03)


@pytest.mark.parametrize(
    "merge", [Rda(), Rda(direct_roles=("matrix", "vector")), Rda(clip=1.0), WeightedMean()], ids=repr
)
def test_of_two_deltas_the_cosine_is_theirs_whatever_they_weigh(merge: Merge) -> None:
    one, other = deltas(2)
    other += np.float32(0.3) * one
    merged = merge([contribution("a", one, 5.0), contribution("b", other)], LAYOUT)
    assert merged.cosine == pytest.approx(cosine(one, other), abs=1e-5)


def test_a_delta_that_is_zero_in_a_piece_has_no_cosine_there() -> None:
    one, other = deltas(2)
    other[:70_001] = 0.0
    merged = Rda()([contribution("a", one), contribution("b", other), contribution("c", other * 0)], LAYOUT)
    assert merged.cosine == pytest.approx(cosine(one, other), abs=1e-5)


@pytest.mark.parametrize("merge", MERGES, ids=repr)
def test_a_merge_into_a_given_array_gives_the_same_bytes(merge: Merge) -> None:
    out = np.full(LAYOUT.size, np.nan, np.float32)
    merged = merge(contributions(3), LAYOUT, out)
    assert merged.delta is out
    assert out.tobytes() == merge(contributions(3), LAYOUT).delta.tobytes()


@pytest.mark.parametrize("weights", [(), (0.0,), (-1.0,), (float("nan"),), (float("inf"), 1.0)])
def test_weights_that_are_none_are_refused(weights: tuple[float, ...]) -> None:
    values = deltas(1)[0]
    with pytest.raises(ValueError, match="weights"):
        WeightedMean()([contribution(f"node{n}", values, weight) for n, weight in enumerate(weights)], LAYOUT)


def test_two_contributions_of_one_node_are_refused() -> None:
    with pytest.raises(ValueError, match="one node"):
        Rda()([contribution("a", delta) for delta in deltas(2)], LAYOUT)


def digests() -> dict[str, str]:
    """sha256 of everything a committing node computes, for fixed contributions."""
    found = {}
    for merge in MERGES:
        merged = merge(contributions(5), LAYOUT)
        for outer in (Nesterov(), Adam()):
            theta = deltas(1, seed=9)[0]
            state = tuple(np.zeros(LAYOUT.size, np.float32) for _ in outer.state_names())
            for version in (1, 2):
                outer.step(theta, merged.delta, state, version, participants=5)
            body = b"".join(part.tobytes() for part in (merged.delta, theta, *state))
            numbers = json.dumps([merged.cosine, merged.norms]).encode()
            found[f"{merge} {outer}"] = hashlib.sha256(body + numbers).hexdigest()
    return found


def switchable_features() -> list[str]:
    """What this numpy build would use of this CPU beyond its baseline."""
    umath = getattr(np, "_core", None) or np.core
    names: list[str] = umath._multiarray_umath.__cpu_dispatch__
    return [name for name in names if umath._multiarray_umath.__cpu_features__[name]]


@pytest.mark.parametrize("threads", [1, 3])
def test_another_cpu_and_thread_count_give_the_same_bytes(threads: int) -> None:
    features = switchable_features()
    program = "import json, test_merge; print(json.dumps([test_merge.digests(), test_merge.switchable_features()]))"
    environment = os.environ | {
        "NPY_DISABLE_CPU_FEATURES": " ".join(features),
        "GRADIENTMAIL_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
    }
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    theirs, left = json.loads(ran.stdout)
    assert left == []
    assert theirs == digests()
