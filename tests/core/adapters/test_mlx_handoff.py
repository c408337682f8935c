"""An MLX trainer's state comes back bit for bit, and what cannot is refused."""

# ruff: noqa: E402  # what follows the skip needs mlx

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")

import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from gradientmail_core.adapters.mlx_handoff import MlxHandoff
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.belongings import Belongings, packed, unpacked


class Position:
    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


def program(seed: int, dtype: Any = None) -> tuple[nn.Module, optim.Optimizer]:
    mx.random.seed(seed)
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    module.set_dtype(dtype or mx.float32)
    return module, optim.AdamW(1e-2)


def train(module: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    step = nn.value_and_grad(module, lambda model, inputs: model(inputs).square().sum())
    inner: Any = module
    for _ in range(steps):
        _, slopes = step(module, mx.random.normal((3, 4)).astype(inner.layers[0].weight.dtype))
        optimizer.update(module, slopes)
        mx.eval(module.parameters(), optimizer.state)


def flat(module: nn.Module) -> dict[str, Any]:
    leaves: Any = tree_flatten(module.parameters())
    return {name: np.array(array.astype(mx.float32)) for name, array in leaves}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_who_goes_on_from_a_handoff_ends_on_the_same_bits(dtype: str) -> None:
    module, optimizer = program(0, getattr(mx, dtype))
    train(module, optimizer, 3)
    kept = unpacked(packed(MlxHandoff(module, optimizer, data=Position(7)).save()))
    assert isinstance(kept, Belongings)
    train(module, optimizer, 3)
    other, fresh = program(1, getattr(mx, dtype))
    position = Position()
    MlxHandoff(other, fresh, data=position).load(kept)
    train(other, fresh, 3)
    assert position.at == 7
    assert all(np.array_equal(array, flat(other)[name]) for name, array in flat(module).items())


def test_another_program_is_refused() -> None:
    module, optimizer = program(0)
    with pytest.raises(ConfigurationError, match="other parts"):
        MlxHandoff(module, data=Position()).load(MlxHandoff(module, optimizer).save())


def test_the_state_of_another_optimizer_is_refused() -> None:
    module, optimizer = program(0)
    with pytest.raises(ConfigurationError, match=f"{type(optimizer).__name__} for the optimizer there, Lion here"):
        MlxHandoff(module, optim.Lion(0.1)).load(MlxHandoff(module, optimizer).save())


def test_what_is_frozen_stays_behind_and_stays_as_it_is() -> None:
    module, other = program(0)[0], program(1)[0]
    for one in (module, other):
        one.freeze(recurse=True)
        layers: Any = one
        layers.layers[1].unfreeze()
    kept, before = MlxHandoff(module).save(), flat(other)
    assert sorted(name for name in kept.arrays if name.startswith("module/")) == [
        "module/layers.1.bias", "module/layers.1.weight",
    ]  # fmt: skip
    MlxHandoff(other).load(kept)
    assert np.array_equal(flat(other)["layers.0.weight"], before["layers.0.weight"])
    assert np.array_equal(flat(other)["layers.1.weight"], flat(module)["layers.1.weight"])
    other.unfreeze()
    with pytest.raises(ConfigurationError, match=r"differ in layers\.0"):
        MlxHandoff(other).load(kept)
