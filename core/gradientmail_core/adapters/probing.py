"""A model with a probe: what it answers to a small fixed batch, so that a gossip run can tell how far nodes differ.

    Session(probed(model, lambda: model(batch).softmax(-1).numpy()), algorithm=FactoredGossip(...))

The batch must be the same on every node. Everything else is the wrapped model's own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.adapters.resolving import resolve
from gradientmail_core.tensors.model import Flat, Model
from gradientmail_core.tensors.schema import FragmentLayout, Schema


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """``model`` with ``outputs`` as its probe: probabilities of shape (rows, classes), fp32."""

    model: Model
    outputs: Callable[[], NDArray[np.float32]]

    @property
    def schema(self) -> Schema:
        return self.model.schema

    @property
    def frozen_fingerprint(self) -> str | None:
        return self.model.frozen_fingerprint

    def read(self, layout: FragmentLayout, out: Flat) -> None:
        self.model.read(layout, out)

    def write(self, layout: FragmentLayout, values: Flat) -> None:
        self.model.write(layout, values)

    def reset_optimizer(self) -> None:
        self.model.reset_optimizer()

    def probe_outputs(self) -> NDArray[np.float32]:
        return self.outputs()


def probed(model: object, outputs: Callable[[], NDArray[np.float32]]) -> ProbedModel:
    """``model`` (a module of a known framework, or a :class:`Model`) with a probe of its outputs."""
    return ProbedModel(resolve(model), outputs)
