"""Compute utilization over a line: the share of a run's time in which the accelerator computes.

A model of one replica in the manner of Streaming DiLoCo (arXiv 2501.18512, section 3.1), layer by layer. A step is a
forward pass over the layers, then a backward pass in which each layer first passes the gradient on and then takes that
of its own parameters; the three take equal time, and the first layer passes nothing on. In a step that merges a layer,
its transfer begins once its gradient is there; transfers share one line, first come first served. The layer's next
forward pass but ``overlap`` steps later waits for it. Nothing else waits. Everything is computed for a whole grid of
bandwidths at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Grid: TypeAlias = NDArray[np.float64]

CYCLES = 2
WARM_STEPS = 6


@dataclass(frozen=True, slots=True)
class Layered:
    """A model as the line sees it: its layers, the seconds of a step, and the bits of one whole transfer."""

    layers: int
    step_seconds: float
    bits: float


@dataclass(frozen=True, slots=True)
class Merging:
    """When layers are merged: all of them every ``every`` steps, in ``fragments`` strided groups in turn.

    ``overlap`` steps may pass between a merge and the forward pass that needs its result; 0 is a barrier.
    """

    every: int = 1
    fragments: int = 1
    overlap: int = 0

    def due(self, step: int, layer: int) -> bool:
        """Whether a layer is merged in a step (from 1)."""
        offset = ((layer % self.fragments) + 1) * self.every // self.fragments
        return step % self.every == offset % self.every


def utilization(model: Layered, merging: Merging, bandwidths: Grid) -> Grid:
    """Compute time over total time at each bandwidth, in bits per second."""
    part = model.step_seconds / (3 * model.layers)
    transfer = model.bits / model.layers / bandwidths
    now, line = np.zeros_like(bandwidths), np.zeros_like(bandwidths)
    flying: dict[int, tuple[int, Grid]] = {}
    steps = max(CYCLES * merging.every, WARM_STEPS)
    for step in range(1, steps + 1):
        now = _forward(now, model.layers, part, step, flying)
        for layer in reversed(range(model.layers)):
            now = now + (2 * part if layer else part)
            if merging.due(step, layer):
                line = np.maximum(line, now) + transfer
                flying[layer] = step + 1 + merging.overlap, line
    for _, arrived in flying.values():
        now = np.maximum(now, arrived)
    computed = steps * part * (3 * model.layers - 1)
    return np.asarray(computed / now)


def _forward(now: Grid, layers: int, part: float, step: int, flying: dict[int, tuple[int, Grid]]) -> Grid:
    """The time after a forward pass, which waits for the layers whose transfers are due."""
    waiting = sorted(layer for layer, (needed, _) in flying.items() if needed <= step)
    passed = 0
    for layer in waiting:
        _, arrived = flying.pop(layer)
        now = np.maximum(now + (layer - passed) * part, arrived)
        passed = layer
    return np.asarray(now + (layers - passed) * part)


def bandwidth_for(model: Layered, merging: Merging, targets: Sequence[float], grid: Grid) -> tuple[float | None, ...]:
    """For each target utilization the first bandwidth of ``grid`` that reaches it, None if none does."""
    reached = utilization(model, merging, grid)
    enough = [np.flatnonzero(reached >= target) for target in targets]
    return tuple(float(grid[points[0]]) if points.size else None for points in enough)
