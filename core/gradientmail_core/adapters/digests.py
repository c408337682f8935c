"""Digests of frozen tensors, the same whatever framework keeps them.

A tensor counts by its name, shape and values in row-major order; adapters hand the values over as fp32
where they are fp16 or bf16, which fp32 holds exactly, so a base model kept in bf16 on one node and in
fp32 on another has one digest if the values are the same.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Chunks: TypeAlias = Iterable[NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Hashed:
    """A tensor to be hashed: ``chunks`` gives its values piece by piece, contiguous, on any thread."""

    name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Chunks]

    def digest(self) -> bytes:
        """sha256 over name, shape and values."""
        digest = hashlib.sha256(json.dumps([self.name, list(self.shape)]).encode())
        for chunk in self.chunks():
            digest.update(np.atleast_1d(chunk).view(np.uint8).data)
        return digest.digest()


def combined_digest(tensors: Sequence[Hashed]) -> str | None:
    """sha256 in hex over the digests of ``tensors`` in name order, each on a thread; None if there are none."""
    if not tensors:
        return None
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(Hashed.digest, ordered))
    return hashlib.sha256(b"".join(digests)).hexdigest()
