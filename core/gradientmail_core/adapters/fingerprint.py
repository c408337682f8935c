"""A fingerprint of frozen parameters, equal on two nodes exactly if their frozen values are.

Floating-point values are hashed as fp32, which holds fp16 and bf16 exactly: a base model kept in bf16 on
one node and in fp32 on another has one fingerprint if the values are the same. Each tensor is hashed on
its own, in chunks and on several threads, and the digests are hashed in name order.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_CHUNK_ELEMENTS: Final = 1 << 22


def fingerprint(tensors: Sequence[tuple[str, Tensor]]) -> str | None:
    """sha256 in hex over name, shape and values of ``tensors``; None if there are none."""
    if not tensors:
        return None
    gathered = [(name, _gathered(tensor)) for name, tensor in sorted(tensors, key=lambda item: item[0])]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda item: _digest(*item), gathered))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def wraps_tensors(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a subclass that keeps its data in other tensors (quantised, sharded)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def _digest(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(json.dumps([name, list(tensor.shape)]).encode())
    for plain in _plain(tensor):
        for chunk in _chunks(plain):
            digest.update(chunk.numpy().view(np.uint8).data)
    return digest.digest()


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
