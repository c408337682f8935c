"""Names are the same whatever a model is wrapped in."""

import itertools

import pytest
import torch
from torch import nn

from gradientmail_core.adapters.names import below, common_attribute, is_transparent, places, unwrapped


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.module = nn.Linear(4, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])


def names(module: nn.Module) -> list[str]:
    return sorted(place.path for place in places(module))


class DistributedDataParallel(nn.Module):
    """Named and built as torch's, which needs a process group (tested with one in the Lightning tests)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class CheckpointWrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module


class BaseTuner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class LoraModel(BaseTuner):
    """PEFT's tuners derive from BaseTuner; the base class is what is looked for."""


class PeftModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = LoraModel(model)


WRAPPERS = {
    "compile": lambda module: torch.compile(module),
    "data_parallel": nn.DataParallel,
    "ddp": DistributedDataParallel,
    "checkpoint": CheckpointWrapper,
    "peft": PeftModel,
    "average": torch.optim.swa_utils.AveragedModel,
}


@pytest.mark.parametrize(
    "chosen", [*itertools.combinations(WRAPPERS, 1), *itertools.permutations(WRAPPERS, 2)], ids="+".join
)
def test_wrappers_leave_names_alone(chosen):
    wrapped = Net()
    expected = names(wrapped)
    for wrapper in chosen:
        wrapped = WRAPPERS[wrapper](wrapped)
    assert names(wrapped) == expected
    assert isinstance(unwrapped(wrapped), Net)


def test_a_real_child_called_module_keeps_its_name():
    assert "module.weight" in names(Net())
    assert "module.weight" in names(torch.compile(DistributedDataParallel(Net())))


def test_wrapped_children_deep_inside_the_model():
    net = Net()
    expected = names(net)
    net.blocks[1] = torch.compile(CheckpointWrapper(net.blocks[1]))
    net.module = DistributedDataParallel(torch.compile(net.module))
    assert names(net) == expected


def test_only_the_wrappers_own_child_is_transparent():
    assert is_transparent(DistributedDataParallel(Net()), "module")
    assert not is_transparent(DistributedDataParallel(Net()), "embed")
    assert not is_transparent(Net(), "module")


def test_aliases_are_all_named():
    net = Net()
    net.tied = net.embed
    assert {"embed.weight", "tied.weight"} <= set(names(net))


def test_the_attribute_that_leads_to_everything():
    assert common_attribute([["model.a"], ["model.b", "head.b"]]) == "model"
    assert common_attribute([["net.a", "model.a"], ["net.b", "model.b"]]) == "model"
    assert common_attribute([["model.a"], ["head.b"]]) is None
    assert common_attribute([["weight"]]) is None
    assert common_attribute([]) is None


def test_only_a_whole_attribute_is_left_out():
    assert below("model", "model.a.weight") == "a.weight"
    assert below("model", "model_b.weight") == "model_b.weight"
    assert below(None, "model.a") == "model.a"
