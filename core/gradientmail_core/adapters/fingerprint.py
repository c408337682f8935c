"""A fingerprint of frozen parameters, equal on two nodes exactly if their frozen values are.

Floating-point values are hashed as fp32, which holds fp16 and bf16 exactly: a base model kept in bf16 on
one node and in fp32 on another has one fingerprint if the values are the same. Each tensor is hashed on
its own, in chunks and on several threads, and the digests are hashed in name order.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradientmail_core.adapters.digests import Chunks, Hashed, combined_digest

_CHUNK_ELEMENTS: Final = 1 << 22


def fingerprint(tensors: Sequence[tuple[str, Tensor]]) -> str | None:
    """sha256 in hex over name, shape and values of ``tensors``; None if there are none."""
    gathered = [(name, _gathered(tensor)) for name, tensor in sorted(tensors, key=lambda item: item[0])]
    return combined_digest([Hashed(name, tuple(tensor.shape), partial(_values, tensor)) for name, tensor in gathered])


def wraps_tensors(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a subclass that keeps its data in other tensors (quantised, sharded)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def _values(tensor: Tensor) -> Chunks:
    for plain in _plain(tensor):
        for chunk in _chunks(plain):
            yield chunk.numpy()


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory that make up ``tensor``: itself, or what a subclass wraps."""
    if not wraps_tensors(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # of such subclasses
        yield from _plain(getattr(tensor, name))


@torch.no_grad()
def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.detach().reshape(-1)
    exact = flat.dtype in (torch.float16, torch.bfloat16)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS]
        chunk = chunk.to(torch.float32) if exact else chunk
        yield (chunk if chunk.dtype in (torch.float32, torch.float64) else chunk.view(torch.uint8)).cpu().contiguous()
