"""A PyTorch trainer's state comes back bit for bit, and what cannot is refused by name."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from gradientmail_core.adapters.torch_handoff import TorchHandoff
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.belongings import Belongings, packed, unpacked


class Position:
    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, 3: (1, [2.5, None, True, "x"])}  # type: ignore[dict-item]  # torch knows such keys, too

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict[3] == (1, [2.5, None, True, "x"])  # type: ignore[index]  # torch knows such keys, too
        self.at = state_dict["at"]


def trained(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, amsgrad=True)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.randn(8, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()
    return module, optimizer


def through_a_mailbox(belongings: Belongings) -> Belongings:
    found = unpacked(packed(belongings))
    assert isinstance(found, Belongings)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_module_optimizer_position_and_random_numbers_come_back(dtype: torch.dtype) -> None:
    module, optimizer = trained(dtype)
    kept = TorchHandoff(module, optimizer, data=Position(7)).save()
    expected = torch.randn(3)
    other, fresh, position = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(dtype),
        None,
        Position(),
    )
    fresh = torch.optim.AdamW(other.parameters(), 1.0, amsgrad=True)
    TorchHandoff(other, fresh, data=position).load(through_a_mailbox(kept))
    assert torch.equal(torch.randn(3), expected) and position.at == 7
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    )
    one, two = optimizer.state_dict(), fresh.state_dict()
    assert one["param_groups"] == two["param_groups"]
    for index, state in one["state"].items():
        assert all(torch.equal(value, two["state"][index][name]) for name, value in state.items())


def test_a_copy_does_not_change_with_the_next_step() -> None:
    module, optimizer = trained()
    kept = TorchHandoff(module, optimizer).save()
    before = packed(kept)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    assert packed(kept) == before


def test_another_program_is_refused() -> None:
    module, optimizer = trained()
    with pytest.raises(ConfigurationError, match="differ in optimizer"):
        TorchHandoff(module).load(TorchHandoff(module, optimizer).save())


@pytest.mark.parametrize("other", ["kind", "groups"])
def test_the_state_of_another_optimizer_is_refused_and_nothing_is_loaded(other: str) -> None:
    """torch itself takes another kind's state, and fails in the next step, once the module has been overwritten."""
    (module, optimizer), (here, _) = trained(), trained()
    groups = [{"params": [parameter]} for parameter in here.parameters()]
    own = torch.optim.SGD(here.parameters(), 0.1) if other == "kind" else torch.optim.AdamW(groups, amsgrad=True)
    kept = TorchHandoff(module, optimizer).save()
    before = [parameter.detach().clone() for parameter in here.parameters()]
    with pytest.raises(ConfigurationError, match="AdamW there, SGD here" if other == "kind" else "differ in parameter"):
        TorchHandoff(here, own).load(through_a_mailbox(kept))
    assert all(torch.equal(one, two) for one, two in zip(before, here.parameters(), strict=True))


def test_what_is_not_plain_is_refused_by_its_path() -> None:
    module, _ = trained()
    position: Any = Position()
    position.state_dict = lambda: {"seen": {1, 2}}
    with pytest.raises(ConfigurationError, match="data/seen is a set"):
        TorchHandoff(module, data=position).save()


def test_what_is_frozen_stays_behind_and_stays_as_it_is() -> None:
    module, other = ([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)] for _ in range(2))
    for one in (module, other):
        one[0].requires_grad_(False)
    kept, before = TorchHandoff(torch.nn.Sequential(*module)).save(), other[0].weight.clone()
    assert not [name for name in kept.arrays if "0.weight" in name]
    TorchHandoff(torch.nn.Sequential(*other)).load(through_a_mailbox(kept))
    assert torch.equal(other[0].weight, before) and torch.equal(other[1].weight, module[1].weight)
    other[0].requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"differ in 0\.bias, 0\.weight"):
        TorchHandoff(torch.nn.Sequential(*other)).load(kept)


def test_all_global_generators_and_every_number_come_back() -> None:
    module, position = trained()[0], Stated({"best": float("inf"), "low": np.float64(0.5), "ids": np.arange(3)})
    kept = TorchHandoff(module, data=position).save()
    expected = (random.random(), float(np.random.rand()), float(torch.rand(1)))
    found = Stated({})
    TorchHandoff(module, data=found).load(through_a_mailbox(kept))
    assert (random.random(), float(np.random.rand()), float(torch.rand(1))) == expected
    assert (
        found.state["best"] == float("inf") and found.state["low"] == 0.5 and found.state["ids"].tolist() == [0, 1, 2]
    )


class Stated:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict
