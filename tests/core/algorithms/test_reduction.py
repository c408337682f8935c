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
from gradientmail_core.algorithms.reduction import comparators, measured, norm_of, piece_squares, segments
from gradientmail_core.tensors.kernels import BLOCK, thread_count
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Piece


def layout_of(sizes: list[int]) -> FragmentLayout:
    """Flat pieces back to back."""
    offsets = itertools.accumulate(sizes, initial=0)
    return FragmentLayout(0, tuple(Piece(f"t{at}", (size,), at) for size, at in zip(sizes, offsets, strict=False)))


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 5), st.integers(BLOCK - 2, BLOCK + 2), st.just(3 * BLOCK)), max_size=8))
def test_segments_tile_the_fragment_in_order(sizes: list[int]) -> None:
    layout, at, numbers = layout_of(sizes), 0, []
    for block, held in enumerate(segments(layout)):
        for segment in held:
            piece = layout.pieces[segment.piece]
            assert block * BLOCK + segment.start == at
            assert piece.offset <= at < at + segment.stop - segment.start <= piece.offset + piece.elements
            assert segment.stop <= BLOCK
            at += segment.stop - segment.start
            numbers.append(segment.index)
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

    def decode(start: int, stop: int, out: Flat) -> None:
        np.copyto(out, values[start:stop])

    round_ = measured([Contribution("b", 3.0, decode), Contribution("a", 1.0, decode)], layout)
    assert [held.node for held in round_.contributions] == ["a", "b"]
    assert round_.weights == (0.25, 0.75)
    assert round_.squares.tolist() == [[BLOCK + 7, 10], [BLOCK + 7, 10]]
    assert round_.norms == (layout.size**0.5,) * 2


@pytest.mark.parametrize("merge", [Rda(), Median(clip=1.0)], ids=repr)
def test_squares_taken_before_save_a_pass_and_move_no_bit(merge: Merge) -> None:
    layout, asked = layout_of([BLOCK + 7, 10]), []
    values = np.random.default_rng(0).random((3, layout.size), np.float32)

    def decode(number: int, start: int, stop: int, out: Flat) -> None:
        asked.append(number)
        np.copyto(out, values[number, start:stop])

    plain = [Contribution(f"node{number}", 1.0 + number, partial(decode, number)) for number in range(3)]
    judged = [replace(one, squares=piece_squares(one.decode, layout)) for one in plain]
    assert [norm_of(one.squares) for one in judged if one.squares is not None] == list(merge(plain, layout).norms)
    asked.clear()
    merged = merge(judged, layout)
    assert sorted(asked) == [0, 0, 1, 1, 2, 2]
    assert merged.delta.tobytes() == merge(plain, layout).delta.tobytes()


@pytest.mark.parametrize(("merge", "rows"), [(Rda(), 0), (Median(), 12)], ids=repr)
def test_a_merge_holds_its_result_and_a_few_blocks(merge: Merge, rows: int) -> None:
    count, size = 12, 24 * BLOCK

    def decode(start: int, stop: int, out: Flat) -> None:
        out.fill(0.25)

    given_ = [Contribution(f"node{number}", 1.0, decode) for number in range(count)]
    tracemalloc.start()
    try:
        merge(given_, layout_of([size]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    scratch = thread_count() * (rows + 6) * 4 * BLOCK
    assert peak <= 4 * size + scratch + 2**20
