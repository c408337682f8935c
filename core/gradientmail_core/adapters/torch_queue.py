"""A dataset whose samples all nodes of a run share: each sample is trained on by one of them in a pass.

Without it every node reads the whole dataset in an order of its own, and whether each sample was seen equally often is
left to chance. With it nodes claim blocks of samples through the mailbox, a faster node more of them, and what a node
held when it died is claimed by others. So one pass of all nodes together is one pass over the data, however many nodes
come and go meanwhile.

Samples are drawn where batches are put together, in the training process: worker processes only load them. All nodes
read a pass in the same order, because a block means the same samples to each: a shuffled one comes from the name of the
data and the number of the pass alone, by a generator whose sequence numpy promises never to change.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, TypeVar, cast

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from gradientmail_core.adapters.torch_loaders import Share, with_batches
from gradientmail_core.errors import ConfigurationError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Draw: TypeAlias = Callable[[int], list[int]]
"""The next so many samples of one process, or fewer at the end of a pass; none from there on."""

BLOCKS, SMALLEST = 100, 8
"""Blocks of a pass where their size is left open, few enough to list, enough to divide; and how small they may be."""


class Numbered(Protocol[T_co]):
    """What has a length and numbered samples: a map-style dataset, a list of files."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class SharedQueueDataset(Dataset[T]):
    """``dataset``, which has a length and is the same on every node, with its samples dealt among the nodes.

        DataLoader(SharedQueueDataset(data), batch_size=32, shuffle=True, num_workers=4)

    A node claims ``block`` samples at once: some minutes' worth (default: a hundredth of the data). ``name`` tells
    apart several such datasets of one run. All three are the same on every node; nodes where they differ do not share.
    Where no run is joined it is the dataset itself.
    """

    def __init__(self, dataset: Dataset[T] | Numbered[T], *, block: int | None = None, name: str = "data") -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigurationError(
                f"A {type(dataset).__name__} has no length or no numbered samples, so they cannot be dealt.",
                "Give a map-style dataset, such as a list of files; each node then reads the ones it is dealt.",
            )
        numbered = cast("Numbered[T]", dataset)
        if len(numbered) < 1 or (block is not None and block < 1):
            raise ConfigurationError(
                f"{len(numbered)} samples in blocks of {block} cannot be dealt.", "Use 1 or more of both."
            )
        self.dataset = numbered
        self.name = name
        self.block = block or max(SMALLEST, -(-len(numbered) // BLOCKS))
        self._orders: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> T:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[T]:
        """Several samples at once, for datasets that read them faster so."""
        several = getattr(self.dataset, "__getitems__", None)
        return cast("list[T]", several(indices)) if several else [self.dataset[index] for index in indices]

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_orders": {}}

    def order(self, number: int, *, shuffled: bool) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        """Which sample each unit of pass ``number`` is."""
        if not shuffled:
            return np.arange(len(self))
        if number not in self._orders:
            seed = zlib.crc32(f"{self.name}-{number}".encode())
            self._orders = {number: np.random.RandomState(seed).permutation(len(self))}
        return self._orders[number]


def is_shuffled(loader: DataLoader[T]) -> bool:
    """Whether ``loader`` shuffles; :class:`ConfigurationError` if it chooses samples in a way of its own."""
    batches = loader.batch_sampler
    sampler: object = getattr(batches, "sampler", None)
    match sampler if type(batches) is BatchSampler else None:
        case RandomSampler(replacement=False):
            return True
        case SequentialSampler():
            return False
        case DistributedSampler(shuffle=shuffled):
            return bool(shuffled)
        case _:
            chooser = type(sampler or batches or loader.sampler).__name__
            raise ConfigurationError(
                f"The loader of a SharedQueueDataset has a {chooser}, and the queue decides who reads what.",
                "Give the DataLoader batch_size= and, if you like, shuffle=True; no sampler.",
            )


def dealt(loader: DataLoader[T], draw: Draw, begin: Callable[[], bool], share: Share | None) -> DataLoader[T]:
    """A copy of ``loader`` that reads what ``draw`` deals, in batches of ``share`` or else of its own size.

    ``begin`` is asked where an iteration begins, before anything is drawn, whether there is a run to draw from; while
    there is none, the batches are ``loader``'s own, and it is asked again before each.
    """
    return with_batches(loader, _Dealt(cast(BatchSampler, loader.batch_sampler), draw, begin, share))


class _Dealt:
    """A batch sampler of a length that nobody knows."""

    drop_last = False

    def __init__(self, own: BatchSampler, draw: Draw, begin: Callable[[], bool], share: Share | None) -> None:
        self.sampler = own.sampler
        self._own = own
        self._draw = draw
        self._begin = begin
        self._share = share or (lambda: own.batch_size)

    @property
    def batch_size(self) -> int:
        """The size of the next batch."""
        return max(1, self._share())

    def __len__(self) -> int:
        raise TypeError("How many batches of a shared queue this node will read is not known.")

    def __iter__(self) -> Iterator[list[int]]:
        own = iter(self._own)
        while not self._begin():
            batch = next(own, None)
            if batch is None:
                return
            yield batch
        while batch := self._draw(self.batch_size):
            yield batch


def portion(drawn: Sequence[int], part: int, parts: int) -> list[int]:
    """Process ``part``'s portion of what was drawn for ``parts`` of them: even ones, with something for each."""
    if not drawn:
        return []
    start, end = part * len(drawn) // parts, (part + 1) * len(drawn) // parts
    return list(drawn[start:end]) or [drawn[part % len(drawn)]]
