"""An MLX module as fragments: names that other frameworks share, exact copies in every dtype, optimizers that go on."""

# ruff: noqa: E402  # what follows the skip needs mlx

import threading
from functools import partial

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")

import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from gradientmail_core.adapters import resolve
from gradientmail_core.adapters.mlx import MlxModel
from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.model import KeepingModel
from gradientmail_core.tensors.schema import FragmentLayout, Piece
from tests.sessions import whole

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Gpt(nn.Module):
    """The shape of a language model, with raw arrays in containers beside its layers."""

    def __init__(self, *, tied: bool = True):
        super().__init__()
        self.wte = nn.Embedding(16, 4)
        self.blocks = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 16), nn.Linear(16, 4)) for _ in range(2)]
        self.scales = [mx.ones(3), mx.zeros(2)]
        self.named = {"gain": mx.ones(2), "7": mx.zeros(1)}
        self._cache = mx.zeros(9)
        self.lm_head = self.wte if tied else nn.Linear(4, 16, bias=False)


def module_of(**arrays):
    module = nn.Module()
    for name, array in arrays.items():
        module[name] = array
    return module


def read(model, layout=None):
    layout = layout or whole(model)
    out = np.full(layout.size, np.nan, np.float32)
    model.read(layout, out)
    return out


def values_for(model):
    return np.random.default_rng(1).standard_normal(model.schema.elements, dtype=np.float32)


# Schema


def test_a_schema_holds_names_shapes_and_roles():
    tensors = {tensor.name: tensor for tensor in MlxModel(Gpt(tied=False)).schema.tensors}
    assert tensors["wte.weight"].shape == (16, 4)
    roles = {name: tensor.role for name, tensor in tensors.items() if not name.startswith("blocks.1")}
    assert roles == {
        "wte.weight": "embedding",
        "lm_head.weight": "head",
        "blocks.0.layers.0.weight": "vector",
        "blocks.0.layers.0.bias": "vector",
        "blocks.0.layers.1.weight": "matrix",
        "blocks.0.layers.1.bias": "vector",
        "blocks.0.layers.2.weight": "matrix",
        "blocks.0.layers.2.bias": "vector",
        "scales.0": "vector",
        "scales.1": "vector",
        "named.gain": "vector",
        "named.7": "vector",
    }
    assert set(tensors) == set(dict(tree_flatten(Gpt(tied=False).trainable_parameters())))


def test_a_tied_weight_ships_once_and_stays_tied():
    gpt = Gpt()
    model = MlxModel(gpt)
    names = [tensor.name for tensor in model.schema.tensors]
    assert "lm_head.weight" in names and "wte.weight" not in names
    assert model.aliases == {"lm_head.weight": ("wte.weight",)}
    model.write(whole(model), values_for(model))
    assert gpt.lm_head is gpt.wte
    assert np.array_equal(read(model), values_for(model))


def test_two_modules_given_one_array_are_two_tensors():
    gpt = Gpt(tied=False)
    gpt.lm_head.weight = gpt.wte.weight
    assert MlxModel(gpt).schema == MlxModel(Gpt(tied=False)).schema


def test_only_trainable_parameters_travel():
    gpt = Gpt()
    gpt.freeze()
    gpt.blocks[1].layers[1].unfreeze()
    model = MlxModel(gpt)
    assert [tensor.name for tensor in model.schema.tensors] == ["blocks.1.layers.1.bias", "blocks.1.layers.1.weight"]
    before = {name: np.array(array) for name, array in tree_flatten(gpt.parameters())}
    model.write(whole(model), values_for(model))
    changed = [name for name, array in tree_flatten(gpt.parameters()) if not np.array_equal(array, before[name])]
    assert changed == ["blocks.1.layers.1.weight", "blocks.1.layers.1.bias"]


def test_modules_are_adapted_without_a_word():
    assert isinstance(resolve(nn.Linear(2, 2)), MlxModel)
    assert isinstance(resolve(nn.Linear(2, 2)), KeepingModel)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_is_the_llama_of_hugging_face(tied):
    """Names, shapes, roles, the fingerprint of what is frozen, and what the model computes."""
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("mlx_lm.models.llama")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 40, "tie_word_embeddings": tied}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_theta=10000.0))
    ours = llama.Model(llama.ModelArgs(model_type="llama", **sizes))
    torch_model, mlx_model = TorchModel(theirs), MlxModel(ours)
    assert mlx_model.schema == torch_model.schema
    assert len(mlx_model.schema.tensors) == (20 if tied else 21)
    mlx_model.write(whole(mlx_model), read(torch_model))
    tokens = np.arange(20).reshape(2, 10)
    expected = theirs(torch.from_numpy(tokens)).logits.detach().numpy()
    assert np.allclose(np.asarray(ours(mx.array(tokens))), expected, atol=1e-5)
    theirs.model.layers[0].requires_grad_(False)
    ours.model.layers[0].freeze()
    assert MlxModel(ours).frozen_fingerprint == TorchModel(theirs).frozen_fingerprint


# Values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 3), (6,)])
def test_rows_of_a_tensor(shape, dtype):
    kind = getattr(mx, dtype)
    module = module_of(weight=mx.random.normal(shape).astype(kind))
    model = MlxModel(module)
    before = np.array(module["weight"].astype(mx.float32))
    pieces = (Piece("weight", (2, *shape[1:]), 3, rows=(3, 5)), Piece("weight", (1, *shape[1:]), 0, rows=(0, 1)))
    stride = int(np.prod(shape[1:]))
    layout = FragmentLayout(0, (Piece("weight", pieces[0].shape, stride, rows=(3, 5)), pieces[1]))
    buffer = read(model, layout)
    assert np.array_equal(buffer[stride:].reshape(2, *shape[1:]), before[3:5])
    model.write(layout, buffer * 2)
    before[[0, 3, 4]] *= 2
    assert np.array_equal(np.array(module["weight"].astype(mx.float32)), before)
    assert module["weight"].dtype == kind


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_torchs(dtype):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 7e4, 3.4e38, 1 + 2**-9], np.float32)
    values = np.concatenate([special, np.random.default_rng(0).standard_normal(4000).astype(np.float32)])
    model = MlxModel(module_of(weight=mx.zeros(values.size, dtype=getattr(mx, dtype))))
    model.write(whole(model), values)
    expected = torch.from_numpy(values).to(DTYPES[dtype]).float().numpy()
    found = read(model)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found[:2]), [False, True])


@pytest.mark.parametrize(
    "array",
    [mx.zeros((5, 3)).T, mx.zeros((2, 3, 4)).transpose(2, 0, 1), mx.array(0.0), mx.zeros((0, 3)), mx.zeros((3, 0))],
    ids=["transposed", "permuted", "scalar", "empty", "no_columns"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_memory_layout(array, dtype):
    model = MlxModel(module_of(weight=(array + 1).astype(getattr(mx, dtype)), anchor=mx.zeros(2)))
    assert np.array_equal(read(model), [0, 0, *[1] * array.size])
    values = np.arange(array.size + 2, dtype=np.float32)
    model.write(whole(model), values)
    assert np.array_equal(read(model), values)


def test_a_transposed_array_is_read_in_its_own_order():
    array = mx.arange(6, dtype=mx.bfloat16).reshape(2, 3).T
    assert read(MlxModel(module_of(weight=array))).tolist() == [0, 3, 1, 4, 2, 5]


def test_double_precision_survives():
    with mx.stream(mx.cpu):
        model = MlxModel(module_of(weight=mx.zeros(3, dtype=mx.float64)))
        model.write(whole(model), np.float32([1, 2, 3]))
        assert model.array("weight").dtype == mx.float64
        assert read(model).tolist() == [1, 2, 3]


def test_what_is_lazy_is_evaluated_before_it_leaves_the_thread():
    """Both ways: a snapshot of arrays that nobody evaluated, and arrays that another thread then looks at."""
    module = module_of(weight=mx.ones(4), low=mx.ones(2, dtype=mx.bfloat16))
    model = MlxModel(module)
    module["weight"] = module["weight"] * 3
    module["low"] = module["low"] * 3
    taken, seen = read(model), []
    assert taken.tolist() == [3] * 6
    module["weight"] = module["weight"] + 1
    model.write(whole(model), taken)
    kept = model.keep()

    def look():
        seen.append(taken.sum())
        seen.extend(float(np.array(array.astype(mx.float32)).sum()) for array in kept.values())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [18.0, 12.0, 6.0]


def test_parameters_are_set_aside_and_back():
    module = module_of(weight=mx.array([1.5, 2.5]), frozen=mx.zeros(1))
    module.freeze(keys="frozen", recurse=False)
    model = MlxModel(module)
    kept = model.keep()
    model.write(whole(model), np.float32([7, 8]))
    model.restore(kept)
    assert module["weight"].tolist() == [1.5, 2.5]


def test_arrays_in_containers_are_replaced_one_by_one():
    gpt = Gpt()
    model = MlxModel(gpt)
    model.write(FragmentLayout(0, (Piece("scales.1", (2,), 0), Piece("named.7", (1,), 2))), np.float32([4, 5, 6]))
    assert [array.tolist() for array in gpt.scales] == [[1, 1, 1], [4, 5]]
    assert gpt.named["7"].tolist() == [6]
    assert gpt.named["gain"].tolist() == [1, 1]


# Frozen parameters


def test_the_fingerprint_is_of_the_frozen_values():
    def of(base):
        module = module_of(base=base, adapter=mx.zeros(2))
        module.freeze(keys="base", recurse=False)
        return MlxModel(module).frozen_fingerprint

    base = mx.random.normal((64, 8)).astype(mx.bfloat16)
    other = base.astype(mx.float32)
    assert of(base) == of(other) == of(base.T.astype(mx.float32).T)
    other[63, 7] += 1
    assert of(base) != of(other)
    assert of(base) != of(base.reshape(8, 64))
    assert MlxModel(Gpt()).frozen_fingerprint is None


def test_a_quantised_base_is_part_of_the_fingerprint():
    def of(seed):
        mx.random.seed(seed)
        module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        nn.quantize(module, class_predicate=lambda path, _: path == "layers.0")
        return MlxModel(module)

    model = of(1)
    assert [tensor.name for tensor in model.schema.tensors] == ["layers.0.bias", "layers.1.bias", "layers.1.weight"]
    assert model.frozen_fingerprint == of(1).frozen_fingerprint != of(2).frozen_fingerprint


def test_running_statistics_stay_local():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm(2))
    model = MlxModel(module)
    assert model.unmerged_buffers == ["layers.1.running_mean", "layers.1.running_var"]
    assert model.frozen_fingerprint is None


def test_running_statistics_travel_if_the_run_wants_them():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm(2))
    model = resolve(module, buffers="mean")
    roles = {tensor.name: tensor.role for tensor in model.schema.tensors}
    assert roles["layers.1.running_mean"] == roles["layers.1.running_var"] == "buffer"
    model.write(whole(model), np.full(model.schema.elements, 3, np.float32))
    assert module.layers[1].running_var.tolist() == [3, 3]
    assert model.unmerged_buffers == []


# Refusals


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigurationError, match=r"Gpt has no trainable parameters.*LoRA"):
        MlxModel(Gpt().freeze())


@pytest.mark.parametrize("dtype", ["uint32", "complex64"])
def test_trainable_arrays_that_cannot_be_merged_are_refused(dtype):
    with pytest.raises(ConfigurationError, match=rf"odd is trainable but is of .*{dtype}.*LoRA"):
        MlxModel(module_of(fine=mx.zeros(2), odd=mx.zeros(2, dtype=getattr(mx, dtype))))


# Optimizers

OPTIMIZERS = {
    "adam": lambda: optim.Adam(0.1, bias_correction=True),
    "adamw": lambda: optim.AdamW(0.1),
    "momentum": lambda: optim.SGD(0.1, momentum=0.9),
    "sgd": lambda: optim.SGD(0.1),
    "adafactor": lambda: optim.Adafactor(),
    "muon": lambda: optim.Muon(0.1),
    "several": lambda: optim.MultiOptimizer([optim.Adam(0.1), optim.SGD(0.1, momentum=0.9)], [lambda n, _: "1" in n]),
}


def stepping(module, optimizer, *, compiled=True):
    """A step as mlx-lm makes it. The first compilation of each shape is slow on a CPU."""
    state = [module.state, optimizer.state]
    value_and_grad = nn.value_and_grad(module, lambda module, x: module(x).square().mean())

    def step(x):
        loss, gradients = value_and_grad(module, x)
        optimizer.update(module, gradients)
        return loss

    if compiled:
        step = partial(mx.compile, inputs=state, outputs=state)(step)

    def run(count):
        for number in range(count):
            step(mx.full((3, 4), number + 1.0))
            mx.eval(state)

    return run


def network():
    mx.random.seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_reset_optimizer_steps_like_a_new_one(kind):
    module, optimizer = network(), OPTIMIZERS[kind]()
    model = MlxModel(module)
    model.track_optimizer(optimizer)
    start, run = read(model), stepping(module, optimizer, compiled=kind in ("momentum", "several"))
    run(3)
    fresh = read(model)
    run(2)
    model.reset_optimizer()
    model.write(whole(model), start)
    run(3)
    assert not np.array_equal(fresh, start)
    assert np.array_equal(read(model), fresh)


def test_a_reset_keeps_the_place_in_a_learning_rate_schedule():
    module, optimizer = network(), optim.Adam(optim.linear_schedule(1.0, 0.0, 10))
    model = MlxModel(module)
    model.track_optimizer(optimizer)
    run = stepping(module, optimizer, compiled=False)
    run(5)
    model.reset_optimizer()
    assert optimizer.step.item() == 5
    assert not any(array.any() for name, array in tree_flatten(optimizer.state) if name.startswith("layers"))
    run(1)
    assert optimizer.learning_rate.item() == pytest.approx(0.5)


def test_an_optimizer_that_never_stepped_can_be_reset():
    module, optimizer = network(), optim.Adam(0.1)
    model = MlxModel(module)
    model.track_optimizer(optimizer)
    model.reset_optimizer()
    stepping(module, optimizer, compiled=False)(1)


def test_a_commit_reaches_the_compiled_step_and_leaves_the_optimizer_alone():
    module, optimizer = network(), optim.Adam(0.1)
    model, run = MlxModel(module), stepping(module, optimizer)
    run(3)
    before = {name: np.array(array) for name, array in tree_flatten(optimizer.state)}
    model.write(whole(model), np.zeros(model.schema.elements, np.float32))
    after = dict(tree_flatten(optimizer.state))
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert after.keys() == before.keys()
    loss = nn.value_and_grad(module, lambda module: module(mx.ones((1, 4))).square().mean())(module)[0]
    assert loss.item() == 0
    run(1)
    assert np.abs(read(model)).max() < 0.5


def test_an_optimizer_of_somebody_elses_is_let_go():
    module = network()
    model = MlxModel(module)
    model.track_optimizer(optim.Adam(0.1))
    model.reset_optimizer()
