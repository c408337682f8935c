"""An MLX trainer's state as arrays and plain values: module, optimizer, random numbers, and what else has a state.

bf16 goes as its bit patterns, so every format comes back bit for bit. Everything is evaluated as it is read and as it
is set, on the training thread: no lazy array is left for another one. Parameters that do not train are left out: they
are the same on every node, and an adapter's base model is many times as large as the adapter.
"""

from collections.abc import Mapping
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_unflatten

from gradientmail_core.adapters.mlx import Tree, unfrozen
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.belongings import Array, Belongings


class Plain(Protocol):
    """A data stream or the like, whose state is made of numbers, text, lists and dictionaries."""

    def state_dict(self) -> dict[str, object]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Go on from it."""
        ...


class MlxHandoff:
    """What ``Session(handoff=...)`` keeps of an MLX trainer. ``others``: its place in the data and the like."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None = None, **others: Plain) -> None:
        self._module = module
        self._optimizer = optimizer
        self._others = others

    def save(self) -> Belongings:
        """A copy of everything, on the host."""
        arrays: dict[str, Array] = {}
        coarse: list[str] = []
        for name, value in self._trees().items():
            for path, array in _leaves(value):
                key = f"{name}/{path}"
                mx.eval(array)
                if array.dtype == mx.bfloat16:
                    coarse.append(key)
                arrays[key] = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
        others = {name: part.state_dict() for name, part in self._others.items()}
        return Belongings(arrays, {"bf16": coarse, "optimizer": self._kind(), "others": others})

    def load(self, belongings: Belongings) -> None:
        """Set everything to what was saved. Raises :class:`ConfigurationError` if that was another kind of trainer."""
        plain = belongings.plain
        others, optimizer = plain.get("others"), plain.get("optimizer")
        if not isinstance(others, dict) or others.keys() != self._others.keys() or optimizer != self._kind():
            raise ConfigurationError(
                f"The hand-off was made by a program with other parts: {optimizer} for the optimizer there, "
                f"{self._kind()} here.",
                "Start that one, or use another node name.",
            )
        self._check_names(belongings)
        self._module.update(_tree(belongings, "module"))
        if self._optimizer is not None:
            self._optimizer.state = _tree(belongings, "optimizer")
        for number, state in enumerate(_random_state()):
            state[...] = _array(belongings, f"random/{number}")
        for name, part in self._others.items():
            part.load_state_dict(others[name])
        mx.eval(self._module.parameters(), _random_state())

    def _kind(self) -> str | None:
        return None if self._optimizer is None else type(self._optimizer).__name__

    def _check_names(self, belongings: Belongings) -> None:
        names = {name.removeprefix("module/") for name in belongings.arrays if name.startswith("module/")}
        differing = sorted(names ^ {path for path, _ in _leaves(self._trees()["module"])})
        if differing:
            raise ConfigurationError(
                f"The hand-off and this program differ in {', '.join(differing[:5])}.",
                "Build the model that made it, or use another node name.",
            )

    def _trees(self) -> Mapping[str, Tree]:
        state = self._optimizer.state if self._optimizer is not None else {}
        return {
            "module": tree_unflatten(list(unfrozen(self._module).items())),
            "optimizer": state,
            "random": _random_state(),
        }


def _random_state() -> list[mx.array]:
    state: Tree = mx.random.state
    return list(state)


def _leaves(tree: Tree) -> list[tuple[str, mx.array]]:
    """The arrays of a tree with their paths."""
    leaves: Tree = tree_flatten(tree)
    return list(leaves)


def _tree(belongings: Belongings, name: str) -> Tree:
    start = f"{name}/"
    found = [(key.removeprefix(start), _array(belongings, key)) for key in belongings.arrays if key.startswith(start)]
    return tree_unflatten(found) if found else {}


def _array(belongings: Belongings, key: str) -> mx.array:
    coarse = belongings.plain.get("bf16")
    array = mx.array(belongings.arrays[key])
    return array.view(mx.bfloat16) if isinstance(coarse, list) and key in coarse else array
