"""What a node reads with torch's ``DataLoader``: how much a batch counts, in which order, and how large it is.

**Order.** Nodes that were seeded alike shuffle alike, and then train on the same batches: together they learn what
one of them would. So a sampler that draws from the process's global generator gets one of its own, seeded from the
global seed and the node's name. A sampler with a generator of its own is somebody's decision and is left alone.

**Size.** A node's share of a global batch changes whenever nodes come and go, also in the middle of an epoch. Trainers
fix the number of batches of an epoch before it begins, and hang schedules, validation and the last accumulation window
on it. An epoch that is one pass over the data has more or fewer batches than was said as soon as their size changes: a
smaller size loses the end of the data, a larger one ends the epoch before its last batch. :class:`ElasticStream` keeps
the number of batches instead, and lets the data run on: where one epoch ends in the middle of the data, the next goes
on. That loses nothing and repeats nothing, because the stream is asked for indices in the main process, ahead of
training by what workers prefetch, and it remembers what it handed out until it is told that this was trained on. What
was not is handed out again, first of all, in the same order, when the loader is started anew.

Loaders are copied, never changed: the user's stays as it was.
"""

import base64
import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from gradientmail_core.adapters.seeding import node_seed
from gradientmail_core.errors import ConfigurationError

T = TypeVar("T")
Share: TypeAlias = Callable[[], int]
"""How many samples the next batch of one process should have; asked once for each batch."""

_TOKENS: Final = "input_ids"


# -- how much a batch counts -------------------------------------------------------------------------------


def samples_in(batch: object) -> int:
    """Tokens of ``batch`` where it names ``input_ids``, else the length of its first tensor, or of a plain list.

    Reads shapes only, so no device is waited for. 1 for a batch that shows no size.
    """
    tokens = batch.get(_TOKENS) if isinstance(batch, Mapping) else getattr(batch, _TOKENS, None)
    if isinstance(tokens, Tensor):
        return tokens.numel()
    size = _first_length(batch)
    return 1 if size is None else size


def _first_length(batch: object) -> int | None:
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, str | bytes):
        return None
    if isinstance(batch, Mapping):
        parts: Sequence[object] = list(batch.values())
    else:
        parts = batch if isinstance(batch, Sequence) else list(getattr(batch, "__dict__", {}).values())
    lengths = (_first_length(part) for part in parts)
    items = len(batch) if isinstance(batch, Sequence) and batch else None
    return next((length for length in lengths if length is not None), items)


# -- in which order ----------------------------------------------------------------------------------------


def in_own_order(loader: object, node: str, seed: int | None = None) -> object:
    """``loader``, or a copy of it whose sampler draws from a generator of this node's own.

    ``seed`` tells apart loaders that a node makes one after the other (default: torch's initial seed).
    """
    if not isinstance(loader, DataLoader):
        return loader
    sampler: object = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if getattr(sampler, "generator", sampler) is not None:
        return loader
    own = copy.copy(sampler)
    vars(own)["generator"] = torch.Generator().manual_seed(
        node_seed(node, torch.initial_seed() if seed is None else seed)
    )
    return with_sampler(loader, own)


def with_sampler(loader: DataLoader[T], sampler: object) -> DataLoader[T]:
    """A copy of ``loader`` that draws from ``sampler``, in batches where it did so before."""
    parts = {"sampler": sampler}
    if loader.batch_sampler is not None:
        batches = copy.copy(loader.batch_sampler)
        vars(batches)["sampler"] = sampler
        parts["batch_sampler"] = batches
    return _copied(loader, parts)


def with_batches(loader: DataLoader[T], batches: object) -> DataLoader[T]:
    """A copy of ``loader`` that reads the batches of indices that ``batches`` yields."""
    return _copied(loader, {"batch_sampler": batches})


def _copied(loader: DataLoader[T], parts: Mapping[str, object]) -> DataLoader[T]:
    clone = copy.copy(loader)
    clone._iterator = None
    for name, part in parts.items():
        # DataLoader refuses to have these replaced, because its other fields would not follow; here they need not.
        object.__setattr__(clone, name, part)
    return clone


# -- how large ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass over the sampler: its number, the items drawn before it, and the generator's state at its start."""

    number: int
    start: int
    order: str | None


class ElasticStream:
    """A batch sampler whose batches follow ``share``, over the indices of ``sampler``, pass after pass without a gap.

    * ``sampler`` gives one pass; its ``set_epoch``, where it has one, is called with the number of each pass.
    * ``share`` is read when a batch is drawn; below 1 counts as 1.
    * ``batches`` is the length, and how many batches one iteration yields; None means no length and no end.
    * ``rank`` of ``world``: each process makes a stream over the same order, and takes its slice of every block of
      ``share × world`` indices. So all have batches of one size, and no index twice. A sampler that already divides
      the data between processes (``DistributedSampler``) needs neither.

    Whoever trains calls :meth:`confirm` after each batch. ``iter()`` hands out again whatever was not confirmed.
    An iterator that another one replaced yields nothing more. A batch may hold the end of a pass and the start of
    the next. Raises :class:`ConfigurationError` for a sampler that yields nothing.

    With ``one_pass`` an iteration ends where its pass does instead, with a smaller batch, or before that one where
    ``drop_last``. How many batches it has then depends on their sizes, so it has no length; and no ranks.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        share: Share,
        *,
        batches: int | None = None,
        rank: int = 0,
        world: int = 1,
        one_pass: bool = False,
        drop_last: bool = False,
    ) -> None:
        self.sampler = sampler
        self.drop_last = drop_last and one_pass
        self._one_pass = one_pass
        self._share = share
        self._batches = batches
        self._rank, self._world = rank, world
        self._iteration = 0
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._items: Iterator[int] = iter(())
        self._passes: list[_Pass] = []
        self._next_pass = number
        self._drawn = self._confirmed = 0
        self._returned: deque[int] = deque()
        self._waiting: deque[list[int]] = deque()

    @property
    def batch_size(self) -> int:
        """The size of the next batch."""
        return max(1, self._share())

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError("This stream has no length.")
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        """Batches from the first index that was not confirmed on."""
        self._returned.extendleft(reversed([index for block in self._waiting for index in block]))
        self._waiting.clear()
        self._iteration += 1
        return self._pass(self._iteration) if self._one_pass else self._iterate(self._iteration)

    def confirm(self, batches: int = 1) -> None:
        """The oldest ``batches`` that were handed out have been trained on; does nothing where there are none."""
        for _ in range(min(batches, len(self._waiting))):
            self._confirmed += len(self._waiting.popleft())
        while len(self._passes) > 1 and self._passes[1].start <= self._confirmed:
            del self._passes[0]

    def state_dict(self) -> dict[str, object]:
        """Where the first index stands that was not confirmed: plain numbers and text."""
        if not self._passes:
            return {"pass": self._next_pass, "position": 0, "order": self._order()}
        current = self._passes[0]
        return {"pass": current.number, "position": self._confirmed - current.start, "order": current.order}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from there, with a sampler like the one that was saved.

        Where the order comes from neither ``set_epoch`` nor a generator, only the position is restored.
        Raises :class:`ConfigurationError` for what :meth:`state_dict` cannot have written.
        """
        number, position, order = state.get("pass"), state.get("position"), state.get("order")
        if not isinstance(number, int) or not isinstance(position, int) or min(number, position) < 0:
            raise ConfigurationError(f"{dict(state)!r} is no position in a stream.", "Give what state_dict() returned.")
        generator = getattr(self.sampler, "generator", None)
        if isinstance(order, str) and isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(order)), dtype=torch.uint8))
        self._begin(number)
        self._iteration += 1
        self._start_pass()
        self._confirmed = self._drawn = sum(1 for _ in itertools.islice(self._items, position))

    def _iterate(self, iteration: int) -> Iterator[list[int]]:
        for _ in itertools.count() if self._batches is None else range(self._batches):
            if iteration != self._iteration:
                return
            size = self.batch_size
            block = [self._next_item() for _ in range(size * self._world)]
            self._waiting.append(block)
            yield block[self._rank * size : (self._rank + 1) * size]

    def _pass(self, iteration: int) -> Iterator[list[int]]:
        """Batches of what is left of the pass, or of the next one where that is nothing."""
        size = self.batch_size
        batch = [self._next_item(), *self._left(size - 1)]
        while len(batch) == size or (batch and not self.drop_last):
            self._waiting.append(batch)
            yield batch
            if iteration != self._iteration:
                return
            size = self.batch_size
            batch = self._left(size)
        if self._waiting:  # what is dropped is done with once what came before it is
            self._waiting[-1] = self._waiting[-1] + batch
        else:
            self._confirmed += len(batch)

    def _left(self, count: int) -> list[int]:
        """Up to ``count`` items of the pass."""
        again = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
        new = list(itertools.islice(self._items, count - len(again)))
        self._drawn += len(new)
        return again + new

    def _next_item(self) -> int:
        found = self._left(1)
        if not found:
            self._start_pass()
            found = self._left(1)
        if not found:
            raise ConfigurationError("The sampler yields nothing.", "Give a dataset with samples in it.")
        return found[0]

    def _start_pass(self) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self._next_pass)
        self._passes.append(_Pass(self._next_pass, self._drawn, self._order()))
        self._next_pass += 1
        self._items = iter(self.sampler)

    def _order(self) -> str | None:
        generator = getattr(self.sampler, "generator", None)
        if not isinstance(generator, torch.Generator):
            return None
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def why_rigid(loader: object) -> str | None:
    """Why the batches of ``loader`` cannot be resized; None if they can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a torch DataLoader"
    if loader.batch_sampler is None:
        return "its dataset makes the batches itself (batch_size=None)"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"its {type(loader.batch_sampler).__name__} decides which samples go together"
    return None


def elastic(
    loader: DataLoader[T], share: Share, *, rank: int = 0, world: int = 1, one_pass: bool = False
) -> "tuple[DataLoader[T] | ContinuedLoader, ElasticStream]":
    """A copy of ``loader`` whose batches follow ``share``, and its stream, to be told of each batch trained on.

    An epoch keeps its number of batches where it has one. With an ``IterableDataset`` only the sizes are the
    stream's. Where it has a length, its items run on over the epochs, and over the ends of the data, through one
    iterator that is kept; without a length an epoch is one pass. Such a stream's position cannot be restored.
    With ``one_pass`` every epoch is one pass over the data, and has no length. Call :func:`why_rigid` first.
    """
    batches = cast(BatchSampler, loader.batch_sampler)
    if one_pass:
        return _in_passes(loader, share)
    if not isinstance(loader.dataset, IterableDataset):
        stream = ElasticStream(batches.sampler, share, batches=len(batches), rank=rank, world=world)
        return _copied(loader, {"batch_sampler": stream}), stream
    stream = ElasticStream(batches.sampler, share)
    try:
        length = len(loader)
    except TypeError:
        return _copied(loader, {"batch_sampler": stream}), stream
    endless = _copied(loader, {"batch_sampler": stream, "dataset": _Endless(loader.dataset)})
    endless._IterableDataset_len_called = None
    return ContinuedLoader(endless, length), stream


def _in_passes(loader: DataLoader[T], share: Share) -> tuple[DataLoader[T], ElasticStream]:
    batches = cast(BatchSampler, loader.batch_sampler)
    if isinstance(loader.dataset, IterableDataset):
        stream = ElasticStream(batches.sampler, share)
        return _copied(loader, {"batch_sampler": stream, "dataset": _Unsized(loader.dataset)}), stream
    stream = ElasticStream(batches.sampler, share, one_pass=True, drop_last=loader.drop_last)
    return with_batches(loader, stream), stream


class _Unsized(IterableDataset[T]):
    """The dataset, without its length: that of its batches is not known."""

    def __init__(self, dataset: IterableDataset[T]) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[T]:
        return iter(self._dataset)


class _Endless(IterableDataset[T]):
    """Begins the dataset again where it ends, in each worker for itself."""

    def __init__(self, dataset: IterableDataset[T]) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[T]:
        while True:
            empty = True
            for item in self._dataset:
                empty = False
                yield item
            if empty:
                return


class ContinuedLoader:
    """Epochs of ``batches`` batches out of one iterator over ``loader``, which goes on from epoch to epoch."""

    def __init__(self, loader: DataLoader[T], batches: int) -> None:
        self._loader = loader
        self._batches = batches
        self._iterator: Iterator[object] | None = None

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[object]:
        """The next epoch's batches."""
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return itertools.islice(self._iterator, self._batches)
