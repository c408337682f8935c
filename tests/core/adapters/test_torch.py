"""A torch module as fragments: what is in the schema, and bit-exact copies in place whatever the memory looks like."""

import gc

import numpy as np
import pytest
import torch
from torch import nn

from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.schema import FragmentLayout, Piece, Schema


class Gpt(nn.Module):
    """The shape of a language model: tied or untied head, blocks of the vocabulary's size."""

    def __init__(self, *, tied: bool = True, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.lm_head = nn.Linear(4, 16, bias=False)
        self.wte = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 16), nn.Linear(16, 4))])
        if not head_first:
            self.lm_head = nn.Linear(4, 16, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


class LightningModule(nn.Module):
    """Recognised by its class's name, as Lightning's are in both namespaces."""


def whole(schema: Schema) -> FragmentLayout:
    """All tensors in one fragment."""
    pieces, offset = [], 0
    for tensor in schema.tensors:
        pieces.append(Piece(tensor.name, tensor.shape, offset))
        offset += tensor.elements
    return FragmentLayout(0, tuple(pieces))


def read(model: TorchModel) -> np.ndarray:
    layout = whole(model.schema)
    out = np.full(layout.size, np.nan, np.float32)
    model.read(layout, out)
    return out


def module_of(**parameters: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value))
    return module


def values_for(model: TorchModel) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(model.schema.elements, dtype=np.float32)


# Schema


def test_a_schema_holds_names_shapes_and_roles():
    tensors = {tensor.name: tensor for tensor in TorchModel(Gpt(tied=False)).schema.tensors}
    assert tensors["wte.weight"].shape == (16, 4)
    roles = {name: tensor.role for name, tensor in tensors.items()}
    assert roles == {
        "wte.weight": "embedding",
        "lm_head.weight": "head",
        "blocks.0.0.weight": "vector",
        "blocks.0.0.bias": "vector",
        "blocks.0.1.weight": "matrix",
        "blocks.0.1.bias": "vector",
        "blocks.0.2.weight": "matrix",
        "blocks.0.2.bias": "vector",
    }


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_weight_ships_once_under_the_embeddings_name(head_first):
    model = TorchModel(Gpt(head_first=head_first))
    assert [
        tensor.name for tensor in model.schema.tensors if tensor.shape == (16, 4) and "blocks" not in tensor.name
    ] == ["wte.weight"]
    assert model.aliases == {"wte.weight": ("lm_head.weight",)}
    assert model.schema == TorchModel(Gpt()).schema
    assert model.schema.digest != TorchModel(Gpt(tied=False)).schema.digest


def test_writing_a_tied_weight_keeps_the_tie():
    gpt = Gpt()
    model = TorchModel(gpt)
    model.write(whole(model.schema), values_for(model))
    assert gpt.lm_head.weight is gpt.wte.weight
    assert np.array_equal(read(model), values_for(model))


def test_two_parameters_on_one_memory_are_one_tensor():
    gpt = Gpt(tied=False)
    gpt.lm_head.weight = nn.Parameter(gpt.wte.weight.data)
    model = TorchModel(gpt)
    assert model.schema == TorchModel(Gpt()).schema
    model.write(whole(model.schema), values_for(model))
    assert gpt.lm_head.weight.data_ptr() == gpt.wte.weight.data_ptr()
    assert torch.equal(gpt.lm_head.weight, gpt.wte.weight)


def test_a_lightning_module_around_a_model_is_that_model():
    lightning = LightningModule()
    lightning.net = Gpt()
    assert TorchModel(lightning).schema == TorchModel(Gpt()).schema
    lightning.net = torch.compile(lightning.net)
    assert TorchModel(torch.compile(lightning)).schema == TorchModel(Gpt()).schema
    lightning.teacher = Gpt().requires_grad_(False)
    assert TorchModel(lightning).schema == TorchModel(Gpt()).schema
    assert TorchModel(lightning, strip_attribute=False).schema.tensors[0].name.startswith("net.")


def test_a_lightning_module_with_two_trainable_parts_keeps_their_names():
    lightning = LightningModule()
    lightning.encoder, lightning.decoder = nn.Linear(2, 2), nn.Linear(2, 2)
    assert [tensor.name for tensor in TorchModel(lightning).schema.tensors] == [
        "decoder.bias",
        "decoder.weight",
        "encoder.bias",
        "encoder.weight",
    ]


def test_a_plain_module_keeps_its_only_childs_name():
    plain = nn.Module()
    plain.net = nn.Linear(2, 2)
    assert [tensor.name for tensor in TorchModel(plain).schema.tensors] == ["net.bias", "net.weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_digest_is_independent_of_the_dtype(dtype):
    assert TorchModel(Gpt().to(dtype)).schema.digest == TorchModel(Gpt()).schema.digest


def test_only_trainable_parameters_travel():
    gpt = Gpt()
    gpt.requires_grad_(False)
    gpt.blocks[0][1].requires_grad_(True)
    assert [tensor.name for tensor in TorchModel(gpt).schema.tensors] == ["blocks.0.1.bias", "blocks.0.1.weight"]


# Values


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(5, 3).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(6, 8)[::2, ::2],
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(3, 0),
        torch.zeros(1),
    ],
    ids=["transposed", "channels_last", "expanded", "sliced", "scalar", "empty", "no_columns", "one"],
)
def test_any_memory_layout_is_read_and_written_in_place(tensor):
    model = TorchModel(module_of(weight=tensor, anchor=torch.zeros(2)))
    parameter = model.parameter("weight")
    pointer, strides = parameter.data_ptr(), parameter.stride()
    contiguous = np.arange(tensor.numel(), dtype=np.float32).reshape(tensor.shape) + 0.5
    if 0 in strides and tensor.numel():
        contiguous[:] = contiguous[0]
    values = np.concatenate([[7, 8], contiguous.reshape(-1)]).astype(np.float32)
    model.write(whole(model.schema), values)
    assert np.array_equal(read(model), values)
    assert np.array_equal(parameter.detach().numpy(), contiguous)
    assert (parameter.data_ptr(), parameter.stride()) == (pointer, strides)
    assert model.schema == TorchModel(module_of(weight=tensor.contiguous(), anchor=torch.zeros(2))).schema


@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 3), (6,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_tensor(shape, dtype):
    model = TorchModel(module_of(weight=torch.randn(shape).to(dtype)))
    before = model.parameter("weight").detach().float().numpy().copy()
    layout = FragmentLayout(0, (Piece("weight", (2, *shape[1:]), 3, rows=(3, 5)),))
    buffer = np.zeros(3 + layout.size, np.float32)
    model.read(layout, buffer)
    assert np.array_equal(buffer[3:].reshape(2, *shape[1:]), before[3:5])
    model.write(layout, buffer * 2)
    before[3:5] *= 2
    assert np.array_equal(model.parameter("weight").detach().float().numpy(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_to_nearest_even(dtype):
    model = TorchModel(module_of(weight=torch.zeros(4096, dtype=dtype)))
    values = values_for(model)
    model.write(whole(model.schema), values)
    assert np.array_equal(read(model), torch.from_numpy(values).to(dtype).float().numpy())


def test_a_write_leaves_optimizer_and_flags_alone():
    gpt = Gpt()
    optimizer = torch.optim.AdamW(gpt.parameters())
    gpt.lm_head(gpt.blocks[0](gpt.wte(torch.tensor([1, 2])))).sum().backward()
    optimizer.step()
    state = {key: value["exp_avg"].clone() for key, value in optimizer.state.items()}
    model = TorchModel(gpt)
    model.write(whole(model.schema), values_for(model))
    assert all(parameter.requires_grad for parameter in gpt.parameters())
    assert all(torch.equal(optimizer.state[key]["exp_avg"], value) for key, value in state.items())
    assert {id(key) for key in state} == {id(parameter) for parameter in gpt.parameters()}


def test_read_only_values_are_written_without_a_warning(recwarn):
    model = TorchModel(Gpt())
    values = values_for(model)
    values.flags.writeable = False
    model.write(whole(model.schema), values)
    assert np.array_equal(read(model), values)
    assert not recwarn.list


def test_a_replaced_parameter_is_followed():
    module = module_of(weight=torch.zeros(3))
    model = TorchModel(module)
    module.weight = nn.Parameter(torch.ones(3))
    assert np.array_equal(read(model), np.ones(3, np.float32))


# Frozen parameters


def frozen_pair(base: torch.Tensor) -> str | None:
    module = module_of(base=base, adapter=torch.zeros(2))
    module.base.requires_grad_(False)
    return TorchModel(module).frozen_fingerprint


def test_without_frozen_parameters_there_is_no_fingerprint():
    assert TorchModel(Gpt()).frozen_fingerprint is None


def test_the_fingerprint_is_of_the_frozen_values():
    base = torch.randn(64, 8)
    changed = base.clone()
    changed[63, 7] += 1
    assert frozen_pair(base) == frozen_pair(base.t().contiguous().t())
    assert frozen_pair(base) != frozen_pair(changed)
    assert frozen_pair(base) != frozen_pair(base.view(8, 64))
    assert frozen_pair(base.bfloat16()) == frozen_pair(base.bfloat16().float())


def test_the_fingerprint_ignores_wrappers_and_what_is_trained():
    module = module_of(base=torch.ones(4), adapter=torch.zeros(2))
    module.base.requires_grad_(False)
    expected = TorchModel(module).frozen_fingerprint
    module.adapter.data.fill_(3)
    assert TorchModel(torch.compile(module)).frozen_fingerprint == expected


def test_quantised_and_integer_tensors_may_be_frozen():
    module = module_of(adapter=torch.zeros(2))
    module.packed = nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    module.small = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn), requires_grad=False)
    fingerprint = TorchModel(module).frozen_fingerprint
    module.packed.data[5] = 9
    assert TorchModel(module).frozen_fingerprint != fingerprint


def test_what_becomes_trainable_later_is_found():
    gpt = Gpt()
    gpt.wte.requires_grad_(False)
    model = TorchModel(gpt)
    assert model.newly_trainable() == []
    gpt.wte.requires_grad_(True)
    assert model.newly_trainable() == ["wte.weight"]


def test_buffers_that_stay_local_are_named():
    norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert TorchModel(norm).unmerged_buffers == ["1.running_mean", "1.running_var"]
    assert TorchModel(Gpt()).unmerged_buffers == []


def test_buffers_that_are_merged_are_tensors_of_the_schema():
    norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh())
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    model = TorchModel(norm, buffers="mean")
    roles = {tensor.name: tensor.role for tensor in model.schema.tensors}
    assert [name for name, role in roles.items() if role == "buffer"] == ["1.running_mean", "1.running_var"]
    assert (model.unmerged_buffers, model.newly_trainable()) == ([], [])
    layout = whole(model.schema)
    kept = model.keep()
    model.write(layout, np.arange(layout.size, dtype=np.float32))
    found = np.empty(layout.size, np.float32)
    model.read(layout, found)
    assert np.array_equal(found, np.arange(layout.size))
    assert norm[1].running_var.tolist() == [10.0, 11.0]
    model.restore(kept)
    assert norm[1].running_var.tolist() == [1.0, 1.0]


def test_buffers_beside_the_model_of_a_lightning_module_are_left_out():
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    outer = LightningModule()
    outer.net = inner
    outer.register_buffer("steps", torch.zeros(1))
    assert TorchModel(outer, buffers="mean").schema == TorchModel(inner, buffers="mean").schema


# Refusals


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigurationError, match="Gpt has no trainable parameters"):
        TorchModel(Gpt().requires_grad_(False))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_trainable_tensors_that_cannot_be_merged_are_refused(dtype):
    with pytest.raises(ConfigurationError, match=r"odd is trainable but is a Tensor of torch\..*train adapters"):
        TorchModel(module_of(fine=torch.zeros(2), odd=torch.zeros(2).to(dtype)))


def test_tensors_without_memory_are_refused():
    with pytest.raises(ConfigurationError, match="on the meta device"):
        TorchModel(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigurationError, match="lazy parameters without a shape"):
        TorchModel(nn.LazyLinear(2))


def test_flat_parameters_are_refused():
    class FullyShardedDataParallel(nn.Module):
        """FSDP1 needs an accelerator to be built; its class name is what is looked for."""

    wrapper = FullyShardedDataParallel()
    wrapper.inner = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"FSDP1.*ModelParallelStrategy"):
        TorchModel(wrapper)


# Optimizers


def trained(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    for step in range(3):
        optimizer.zero_grad()
        (parameter * (step + 1.0)).sum().backward()
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_reset_optimizer_steps_like_a_new_one(kind):
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    module = module_of(weight=torch.ones(3))
    model = TorchModel(module)
    optimizer = kind(module.parameters(), lr=0.1, **settings)
    model.track_optimizer(optimizer)
    fresh = trained(optimizer, module.weight)
    model.reset_optimizer()
    module.weight.data.fill_(1.0)
    assert torch.equal(trained(optimizer, module.weight), fresh)


def test_without_a_tracked_optimizer_those_that_hold_the_modules_parameters_are_reset():
    module, stranger = module_of(weight=torch.ones(3)), module_of(weight=torch.ones(3))
    own, other = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (module, stranger))
    trained(own, module.weight)
    trained(other, stranger.weight)
    TorchModel(module).reset_optimizer()
    assert not own.state and other.state


def test_a_tracked_optimizer_may_go():
    module = module_of(weight=torch.ones(3))
    model = TorchModel(module)
    model.track_optimizer(torch.optim.AdamW(module.parameters()))
    gc.collect()
    model.reset_optimizer()


def test_parameters_set_aside_come_back_bit_for_bit_whatever_their_memory():
    module = nn.Module()
    module.wide = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    module.expanded = nn.Parameter(torch.randn(1, 3).expand(4, 3))
    module.transposed = nn.Parameter(torch.randn(3, 4).t())
    model = TorchModel(module)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    kept = model.keep()
    model.write(whole(model.schema), np.zeros(whole(model.schema).size, np.float32))
    model.restore(kept)
    assert all(torch.equal(one, two) for one, two in zip(before, module.parameters(), strict=True))
