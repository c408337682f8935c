"""How many rows, how many tokens."""

# ruff: noqa: E402  # what follows the skip needs mlx

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")

import numpy as np

from gradientmail_mlx.batches import drawn_seed, rows_for, seed_order, tokens_in


def test_tokens_are_counted_without_padding():
    ids = mx.zeros((2, 33), dtype=mx.int32)
    assert tokens_in((ids, mx.array([(0, 5), (3, 9)]))) == 14
    assert tokens_in((ids,)) == 66
    assert tokens_in((ids, mx.array([5, 9]))) == 66


@pytest.mark.parametrize(
    ("share", "accumulation", "ranks", "most", "rows"),
    [
        (8, 1, 1, 99, 8),
        (8, 3, 1, 99, 3),
        (9, 1, 2, 99, 10),
        (9, 2, 4, 99, 8),
        (64, 1, 1, 10, 10),
        (64, 1, 4, 10, 8),
        (1, 1, 4, 2, 4),
    ],
)
def test_rows_of_an_iteration(share, accumulation, ranks, most, rows):
    assert rows_for(share, accumulation, ranks, most) == rows


def test_the_order_follows_from_the_seed():
    def drawn(seed):
        seed_order(seed)
        return np.random.permutation(50).tolist()

    assert drawn(5) == drawn(5) != drawn(6)
    seed_order(5)
    first = drawn_seed()
    seed_order(5)
    assert drawn_seed() == first != drawn_seed()
