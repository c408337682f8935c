"""What a node reads under the Trainer: data that no other node reads, in batches of the node's share.

The Trainer has made its loader when training begins, and fixed the number of steps by its length. So the loader stays
and what it asks for indices is exchanged: the seed of its sampler for one of this node's own, and with a global batch
size its batch sampler for an :class:`~gradientmail_core.adapters.torch_loaders.ElasticStream`, which keeps the number
of batches and lets their size follow the share. Accelerate's division between the processes of a node is taken over by
the stream: it caches batch sizes and drops batches of other ones.

On resuming the Trainer runs through the batches of the epoch it has trained on. A stream whose position was restored
stands behind those already, so it is not asked for them.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, cast

import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gradientmail_core.adapters.torch_loaders import ElasticStream, elastic, why_rigid
from gradientmail_core.errors import ConfigurationError

logger = logging.getLogger("gradientmail")

_INDEPENDENT: Final = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers of which any number of indices in a row make a batch."""


class Resumed:
    """The batches of ``stream``, the first iteration's after ``skipped`` that the Trainer only runs through.

    Those cost nothing where the stream was ``restored``; else they are drawn and count as trained on.
    """

    drop_last: Final = False

    def __init__(self, stream: ElasticStream, skipped: int, *, restored: bool) -> None:
        self.stream = stream
        self._skipped = skipped
        self._restored = restored

    @property
    def batch_size(self) -> int:
        """The size of the next batch."""
        return self.stream.batch_size

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[list[int]]:
        skipped, self._skipped = self._skipped, 0
        batches = iter(self.stream)
        for _ in range(skipped):
            yield [] if self._restored else self._passed_over(batches)
        yield from itertools.islice(batches, len(self.stream) - skipped)

    def _passed_over(self, batches: Iterator[list[int]]) -> list[int]:
        batch = next(batches, [])
        self.stream.confirm()
        return batch


def base_of(loader: object) -> object:
    """The torch loader inside Accelerate's."""
    return getattr(loader, "base_dataloader", loader)


def sampler_of(base: "DataLoader[object]") -> object:
    """What decides the order of a torch loader's rows."""
    return getattr(_batch_sampler(base), "sampler", base.sampler)


def own_order(loader: object, seed: int) -> str | None:
    """Let the loader's sampler draw from ``seed``; why that cannot be, if it cannot."""
    base = base_of(loader)
    if not isinstance(base, DataLoader):
        return f"it is a {type(base).__name__}, not a torch DataLoader"
    if isinstance(base.dataset, IterableDataset):
        return "its dataset decides the order"
    sampler = sampler_of(base)
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = seed
        return None
    if isinstance(sampler, SequentialSampler) or not hasattr(sampler, "generator"):
        return f"its {type(sampler).__name__} draws from no generator"
    generator = sampler.generator
    if isinstance(generator, torch.Generator):
        # In place: Accelerate keeps the processes of a node in step through this very object.
        generator.manual_seed(seed)
    else:
        vars(sampler)["generator"] = torch.Generator().manual_seed(seed)
    return None


def why_fixed(loader: object) -> str | None:
    """Why the batches of the Trainer's ``loader`` cannot be resized; None if they can."""
    base = base_of(loader)
    if not isinstance(base, DataLoader) or isinstance(base.dataset, IterableDataset):
        return why_rigid(base)
    batches = _batch_sampler(base)
    if type(batches) is not BatchSampler or type(batches.sampler) not in (*_INDEPENDENT, SeedableRandomSampler):
        kind = type(batches if type(batches) is not BatchSampler else batches.sampler).__name__
        return f"its {kind} decides which samples go together"
    return None


def resize(
    loader: object, share: Callable[[], int], *, rank: int, world: int, skipped: int, position: Mapping[str, object]
) -> ElasticStream:
    """Let the batches of ``loader`` follow ``share``, samples for each of ``world`` processes; the stream they are of.

    Call :func:`why_fixed` first. ``skipped`` batches are run through by a Trainer that resumes; ``position``, where
    there is one, is where the stream stood then. With an ``IterableDataset`` the first process reads for all of
    them, and only the sizes are the stream's.
    """
    base = cast("DataLoader[object]", base_of(loader))
    if isinstance(base.dataset, IterableDataset):
        replacement, stream = elastic(base, share)
        vars(loader)["base_dataloader"] = replacement
        return stream
    sampler = _batch_sampler(base).sampler
    stream = ElasticStream(sampler, share, batches=len(cast(BatchSampler, base.batch_sampler)), rank=rank, world=world)
    restored = _restored(stream, position)
    # DataLoader refuses to have this replaced, because its other fields would not follow; here they need not.
    object.__setattr__(base, "batch_sampler", Resumed(stream, skipped, restored=restored))
    return stream


def _restored(stream: ElasticStream, position: Mapping[str, object]) -> bool:
    if not position:
        return False
    try:
        stream.load_state_dict(position)
    except ConfigurationError as error:
        logger.warning("The data start anew: %s", error)
        return False
    return True


def steps_per_epoch(loader: object, accumulated: int) -> int | None:
    """Optimizer steps in one pass over ``loader``; None if it does not say how long it is."""
    try:
        return max(math.ceil(len(cast("DataLoader[object]", loader)) / accumulated), 1)
    except TypeError:
        return None


def batches_behind(loader: object, steps: int, accumulated: int) -> int:
    """How many batches of its epoch a Trainer has behind it that resumes after ``steps`` optimizer steps."""
    epoch = steps_per_epoch(loader, accumulated)
    return (steps if epoch is None else steps % epoch) * accumulated


def _batch_sampler(base: "DataLoader[object]") -> BatchSampler:
    """The one that batches for all processes, without Accelerate's division between them."""
    batches = base.batch_sampler
    return batches.batch_sampler if isinstance(batches, BatchSamplerShard) else cast(BatchSampler, batches)
