"""Copies between a CUDA device and ordinary host memory, through two page-locked blocks.

A copy from pageable memory stalls the device; page-locking the fragments themselves would take as much
locked memory as the model has. Two blocks of a few megabytes are enough: while one is in flight on the
bus, the other is filled or emptied by the processor.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from gradientmail_core.tensors.model import Flat

BLOCK_ELEMENTS: Final = 4 << 20
"""fp32 elements in one block: 16 MiB."""


class Staging:
    """Two page-locked blocks for one device. Used by the training thread only, on its current stream."""

    def __init__(self, device: torch.device, elements: int = BLOCK_ELEMENTS) -> None:
        self._device = device
        self._blocks = [_Block(device, elements) for _ in range(2)]

    def download(self, source: Tensor, out: Flat) -> None:
        """Start to copy 1-d ``source`` into ``out`` as fp32; complete after :meth:`settle`."""
        start = 0
        while start < out.size:
            block = self._with_room()
            stop = min(out.size, start + block.room)
            block.fetch(source[start:stop], out[start:stop])
            start = stop

    def settle(self) -> None:
        """Wait until every download has arrived."""
        for block in self._blocks:
            block.mark()
        for block in self._blocks:
            block.reuse()

    def upload(self, values: Flat) -> Tensor:
        """``values`` as a 1-d fp32 tensor on the device, in the order of the current stream."""
        target = torch.empty(values.size, dtype=torch.float32, device=self._device)
        start = 0
        while start < values.size:
            block = self._with_room()
            stop = min(values.size, start + block.room)
            block.send(values[start:stop], target[start:stop])
            start = stop
        return target

    def _with_room(self) -> "_Block":
        """The block being filled, or the other one once that is full."""
        if self._blocks[0].room == 0:
            self._blocks[0].mark()
            self._blocks.reverse()
            self._blocks[0].reuse()
        return self._blocks[0]


class _Block:
    """A page-locked buffer, what is to be copied out of it, and the event after its last transfer."""

    def __init__(self, device: torch.device, elements: int) -> None:
        self._device = device
        self._buffer = torch.empty(elements, dtype=torch.float32, pin_memory=device.type == "cuda")
        self._host: Flat = self._buffer.numpy()
        self._used = 0
        self._arriving: list[tuple[int, Flat]] = []
        self._event: torch.cuda.Event | None = None

    @property
    def room(self) -> int:
        return self._buffer.numel() - self._used

    def fetch(self, source: Tensor, out: Flat) -> None:
        self._buffer[self._used : self._used + out.size].copy_(source.to(torch.float32), non_blocking=True)
        self._arriving.append((self._used, out))
        self._used += out.size

    def send(self, values: Flat, target: Tensor) -> None:
        stop = self._used + values.size
        np.copyto(self._host[self._used : stop], values)
        target.copy_(self._buffer[self._used : stop], non_blocking=True)
        self._used = stop

    def mark(self) -> None:
        """Remember the point on the stream after which the buffer is at rest."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
                self._event.record()

    def reuse(self) -> None:
        """Wait for the marked point, hand out what arrived, and start anew."""
        if self._event is not None:
            self._event.synchronize()
        for start, out in self._arriving:
            np.copyto(out, self._host[start : start + out.size])
        self._arriving.clear()
        self._used = 0
