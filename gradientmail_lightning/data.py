"""What a node reads: how much a batch counts, and an order of the data that no other node has.

Nodes that were seeded alike shuffle alike, and then train on the same batches: together they learn what
one of them would. So a sampler that draws from the process's global generator gets one of its own,
seeded from the global seed and the node's name. Loaders are copied, never changed: the user's stays as
it was. A sampler with a generator of its own is somebody's decision and is left alone.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

T = TypeVar("T")

_TOKENS: Final = "input_ids"


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


def node_seed(node: str, seed: int) -> int:
    """A seed in 0 … 2³¹−1 that two nodes do not share, the same at each start with the same ``seed``."""
    digest = hashlib.sha256(f"{node}/{seed}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


def in_own_order(loader: object, node: str) -> object:
    """``loader``, or a copy of it whose sampler draws from a generator of this node's own."""
    if not isinstance(loader, DataLoader):
        return loader
    sampler: object = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if getattr(sampler, "generator", sampler) is not None:
        return loader
    own = copy.copy(sampler)
    vars(own)["generator"] = torch.Generator().manual_seed(node_seed(node, torch.initial_seed()))
    return with_sampler(loader, own)


def with_sampler(loader: DataLoader[T], sampler: object) -> DataLoader[T]:
    """A copy of ``loader`` that draws from ``sampler``, in batches where it did so before."""
    clone = copy.copy(loader)
    clone._iterator = None
    parts = {"sampler": sampler}
    if loader.batch_sampler is not None:
        batches = copy.copy(loader.batch_sampler)
        vars(batches)["sampler"] = sampler
        parts["batch_sampler"] = batches
    for name, part in parts.items():
        # DataLoader refuses to have these replaced, because its other fields would not follow; here they need not.
        object.__setattr__(clone, name, part)
    return clone
