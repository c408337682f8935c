"""How many rows a node reads at a time, in which order, and how much they count.

mlx-lm asks ``iterate_batches`` for batches and fixes their size when training starts. A share that follows
the live nodes therefore means a new iterator whenever the share changes: any ``iterate_batches`` can do
that, a user's own too. mlx-lm shuffles with numpy's global generator, seeded alike on every node, so nodes
would all read the same; here it is seeded anew with the node's name mixed in.
"""

from collections.abc import Callable, Iterator, Sized
from typing import Protocol, TypeAlias

import mlx.core as mx
import numpy as np

Batch: TypeAlias = tuple[mx.array, ...]
"""Token ids (rows, length) and, from mlx-lm, the first and last trained position of each row (rows, 2)."""

Tokens: TypeAlias = Callable[[Batch], int]
"""How much a batch counts, in the unit all nodes use."""


class IterateBatches(Protocol):
    """What mlx-lm calls ``iterate_batches``; it names every argument."""

    def __call__(
        self,
        *,
        dataset: Sized,
        batch_size: int,
        max_seq_length: int,
        loop: bool = False,
        comm_group: mx.distributed.Group | None = None,
    ) -> Iterator[Batch]:
        """This rank's part of batches that have ``batch_size`` rows over the whole group; endless if ``loop``."""
        ...


def tokens_in(batch: Batch) -> int:
    """Tokens in ``batch`` without padding, where it has mlx-lm's positions; else all ids in it."""
    if len(batch) > 1 and batch[1].ndim == 2 and batch[1].shape[1] == 2:
        return int(np.asarray(batch[1])[:, 1].sum())
    return int(batch[0].size)


def rows_for(share: int, accumulation: int, ranks: int, most: int) -> int:
    """Rows of one iteration, so that ``accumulation`` of them make up the share; a multiple of ``ranks``.

    Rounded up, but never above ``most`` (rounded down to such a multiple, at least one row for each rank).
    """
    rows = -(-share // accumulation)
    return max(min(-(-rows // ranks), most // ranks), 1) * ranks


def seed_order(seed: int) -> None:
    """Let what shuffles by numpy's global generator start from ``seed``."""
    np.random.seed(seed)


def drawn_seed() -> int:
    """A number from numpy's global generator: the same at each start that was seeded alike."""
    return int(np.random.randint(2**31 - 1))
