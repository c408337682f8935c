"""What merges are made of: segments that tile a fragment, networks that sort, and bounded memory."""

import itertools
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.algorithms.merge import Contribution, Median, Merge, Rda
from gradientmail_core.algorithms.reduction import comparators, cuts, measured, norm_of, piece_squares
from gradientmail_core.tensors.kernels import BLOCK, SPAN, thread_count
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Piece


def layout_of(sizes: list[int]) -> FragmentLayout:
    """Flat pieces back to back."""
    offsets = itertools.accumulate(sizes, initial=0)
    return FragmentLayout(0, tuple(Piece(f"t{at}", (size,), at) for size, at in zip(sizes, offsets, strict=False)))


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 5), st.integers(BLOCK - 2, BLOCK + 2), st.just(5 * BLOCK)), max_size=8))
def test_runs_tile_the_fragment_in_order(sizes: list[int]) -> None:
    layout, numbers, at = layout_of(sizes), [], 0
    for number, cut in enumerate(cuts(layout)):
        for run in cut:
            piece, length = layout.pieces[run.piece], run.place.stop - run.place.start
            assert number * SPAN + run.place.start == at
            assert piece.offset <= at < at + length <= piece.offset + piece.elements
            assert run.place.stop <= SPAN
            at += length
        assert len({run.piece for run in cut}) == len(cut), "a run is all of a piece in its span"
        numbers += [run.index for run in cut]
    assert at == layout.size
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("count", range(1, 11))
def test_the_network_sorts_every_order(count: int) -> None:
    """By the 0-1 principle a network that sorts all sequences of two values sorts everything."""
    for bits in itertools.product((0, 1), repeat=count):
        values = list(bits)
        for low, high in comparators(count):
            assert low < high
            values[low], values[high] = min(values[low], values[high]), max(values[low], values[high])
        assert values == sorted(bits)


def test_norms_and_weights_of_a_round() -> None:
    layout = layout_of([BLOCK + 7, 10])
    values = np.ones(layout.size, np.float32)

    def read(start: int, stop: int, out: Flat) -> Flat:
        return values[start:stop]

    round_ = measured([Contribution("b", 3.0, read), Contribution("a", 1.0, read)], layout)
    assert [held.node for held in round_.contributions] == ["a", "b"]
    assert round_.weights == (0.25, 0.75)
    assert round_.squares.tolist() == [[BLOCK + 7, 10], [BLOCK + 7, 10]]
    assert round_.norms == (layout.size**0.5,) * 2


def squares_of(values: Flat) -> list[float]:
    """What a pass says of one delta in three pieces."""
    layout = layout_of([SPAN + 9, 3000, values.size - SPAN - 3009])
    return piece_squares(lambda start, stop, out: values[start:stop], layout).tolist()


def exactly(values: Flat) -> list[float]:
    """The same in fp64 throughout."""
    wide = values.astype(np.float64)
    return [float(np.square(part).sum()) for part in np.split(wide, [SPAN + 9, SPAN + 3009])]


@pytest.mark.parametrize("magnitude", [1.0, 1e30, 1e-17, 1e-22, 1e-30, 1e-44])
def test_squares_are_right_over_the_whole_range_of_fp32(magnitude: float) -> None:
    noise = np.random.default_rng(3).standard_normal(SPAN + BLOCK).astype(np.float32)
    values = noise * np.float32(magnitude)
    assert squares_of(values) == pytest.approx(exactly(values), rel=1e-6, abs=0.0)
    level = np.full_like(values, 0.7 * magnitude)  # every sum of a column is rounded alike
    assert squares_of(level) == pytest.approx(exactly(level), rel=8e-6, abs=0.0)


def test_squares_of_what_is_zero_or_not_finite() -> None:
    values = np.zeros(SPAN + BLOCK, np.float32)
    assert squares_of(values) == [0.0, 0.0, 0.0]
    values[SPAN + 10] = np.inf
    values[-1] = np.nan
    first, second, third = squares_of(values)
    assert (first, second) == (0.0, np.inf)
    assert np.isnan(third)


@pytest.mark.parametrize("merge", [Rda(), Median(clip=1.0)], ids=repr)
def test_squares_taken_before_save_a_pass_and_move_no_bit(merge: Merge) -> None:
    layout, asked = layout_of([BLOCK + 7, 10]), []
    values = np.random.default_rng(0).random((3, layout.size), np.float32)

    def read(number: int, start: int, stop: int, out: Flat) -> Flat:
        asked.append(number)
        return values[number, start:stop]

    plain = [Contribution(f"node{number}", 1.0 + number, partial(read, number)) for number in range(3)]
    judged = [replace(one, squares=piece_squares(one.read, layout)) for one in plain]
    assert [norm_of(one.squares) for one in judged if one.squares is not None] == list(merge(plain, layout).norms)
    asked.clear()
    merged = merge(judged, layout)
    parts = 1 if isinstance(merge, Rda) else 2  # one span, or two blocks
    assert sorted(asked) == sorted([0, 1, 2] * parts)
    assert merged.delta.tobytes() == merge(plain, layout).delta.tobytes()


@pytest.mark.parametrize(("merge", "rows"), [(Rda(), 0), (Median(), 12)], ids=repr)
def test_a_merge_holds_its_result_and_a_few_spans(merge: Merge, rows: int) -> None:
    count, size = 12, 8 * SPAN

    def read(start: int, stop: int, out: Flat) -> Flat:
        out.fill(0.25)
        return out

    given_ = [Contribution(f"node{number}", 1.0, read) for number in range(count)]
    tracemalloc.start()
    try:
        merge(given_, layout_of([size]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    scratch = thread_count() * (rows * BLOCK + 6 * SPAN) * 4
    assert peak <= 4 * size + scratch + 2**20
