"""What travels of models as the Trainer trains them: adapters, ties, compiled, quantised, placed, in half precision."""

import logging

import peft
import pytest
import torch
from accelerate import dispatch_model
from torch import nn

from gradientmail_core.errors import ConfigurationError
from tests.hf.nodes import RecordingCallback, fit, llama

LORA = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"}


def names(callback):
    return [tensor.name for tensor in callback.recorded.model.schema.tensors]


def bare():
    """The names in a model that nothing is wrapped around; the tied head has none of its own."""
    return sorted(name for name, _ in llama().named_parameters())


def test_tied_weights_travel_once_and_stay_tied(tmp_path):
    callback = RecordingCallback(commits={8: 2.0})
    made = fit(tmp_path, callback)
    assert names(callback) == bare() and "lm_head.weight" not in bare()
    assert made.model.lm_head.weight is made.model.model.embed_tokens.weight
    assert torch.all(made.model.lm_head.weight == 2.0)


def test_an_untied_head_travels_too(tmp_path):
    callback = RecordingCallback()
    fit(tmp_path, callback, llama(tie_word_embeddings=False), max_steps=1)
    assert names(callback) == sorted([*bare(), "lm_head.weight"])


WAYS = {
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "checkpointed": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "accumulated-and-clipped": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_way_of_training_changes_no_name(tmp_path, way):
    callback = RecordingCallback(commits={2: 0.5})
    made = fit(tmp_path, callback, max_steps=2, **WAYS[way])
    assert names(callback) == bare()
    assert all(torch.all(parameter == 0.5) for parameter in made.model.parameters())
    assert callback.recorded.names == ["join", "step", "close"]


def test_a_model_in_half_precision_keeps_its_dtype(tmp_path):
    callback = RecordingCallback(commits={2: 0.5})
    made = fit(tmp_path, callback, llama().to(torch.bfloat16), max_steps=2)
    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.bfloat16}
    assert all(torch.all(parameter == 0.5) for parameter in made.model.parameters())


def test_a_placed_model_trains_where_it_is(tmp_path):
    """As ``device_map`` leaves it: hooks around each part bring inputs to the part's device."""
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    model = dispatch_model(llama(), dict.fromkeys(parts, "cpu"), main_device="cpu", force_hooks=True)
    assert len(model.hf_device_map) == 5 and hasattr(model.lm_head, "_hf_hook")
    callback = RecordingCallback(commits={2: 0.5})
    made = fit(tmp_path, callback, model, max_steps=2)
    assert names(callback) == bare()
    assert torch.all(made.model.lm_head.weight == 0.5)


# Adapters


def adapted(seed=0, base=None, **changes):
    model = llama(seed) if base is None else base
    torch.manual_seed(7)
    return peft.get_peft_model(model, peft.LoraConfig(**{**LORA, "target_modules": ["q_proj", "v_proj"], **changes}))


def test_only_adapters_travel(tmp_path):
    callback = RecordingCallback(commits={2: 0.5})
    model = adapted()
    before = {name: value.clone() for name, value in model.named_parameters() if "lora" not in name}
    made = fit(tmp_path, callback, model, max_steps=2)
    layer = "model.layers.0.self_attn"
    sides = [f"{layer}.{projection}.lora_{side}.default.weight" for projection in ("q_proj", "v_proj") for side in "AB"]
    assert names(callback) == sides
    after = dict(made.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(torch.all(value == 0.5) for name, value in after.items() if "lora" in name)


def fingerprint(folder, model):
    callback = RecordingCallback()
    fit(folder, callback, model, max_steps=1)
    return callback.recorded.model.frozen_fingerprint


def test_the_base_must_be_the_same_on_every_node(tmp_path):
    assert fingerprint(tmp_path, adapted(0)) == fingerprint(tmp_path, adapted(0)) is not None
    assert fingerprint(tmp_path, adapted(0)) != fingerprint(tmp_path, adapted(1))
    assert fingerprint(tmp_path, llama()) is None


class EightBit(nn.Linear):
    """A linear layer whose weights are kept in eight bits with one scale, as a quantised base has them."""

    def __init__(self, stock: nn.Linear) -> None:
        super().__init__(stock.in_features, stock.out_features, bias=False, device="meta")
        self.scale = float(stock.weight.detach().abs().max()) / 127
        values = (stock.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight.to(inputs.dtype) * self.scale)


def quantised(seed=0):
    model = llama(seed).requires_grad_(False)
    attention = model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, EightBit(getattr(attention, name)))
    return model


def test_a_quantised_base_stays_as_it_is(tmp_path):
    model = adapted(base=quantised())
    kept = [module.weight.clone() for module in model.modules() if isinstance(module, EightBit)]
    callback = RecordingCallback(commits={2: 0.5})
    made = fit(tmp_path, callback, model, max_steps=3)
    assert all("lora" in name for name in names(callback))
    after = [module.weight for module in made.model.modules() if isinstance(module, EightBit)]
    assert len(kept) == 4 and all(torch.equal(one, other) for one, other in zip(kept, after, strict=True))
    assert callback.recorded.samples == [24] * 3


def test_what_is_quantised_counts_in_the_fingerprint(tmp_path):
    one, same, other = (fingerprint(tmp_path, adapted(base=quantised(seed))) for seed in (0, 0, 1))
    assert one == same != other


def test_training_what_is_quantised_is_refused(tmp_path):
    model = adapted(base=quantised())
    with torch.no_grad():
        model.base_model.model.lm_head.weight.data = model.base_model.model.lm_head.weight.data.to(torch.float8_e4m3fn)
    model.base_model.model.lm_head.weight.requires_grad_(True)
    with pytest.raises(ConfigurationError, match="freeze it and train adapters"):
        fit(tmp_path, RecordingCallback(), model)


def test_batch_norm_statistics_are_a_warning(tmp_path, caplog, monkeypatch):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(32, 4), nn.BatchNorm1d(4), nn.Linear(4, 32)

        def forward(self, input_ids, labels=None):
            hidden = self.norm(self.embed(input_ids).mean(1))
            return {"loss": nn.functional.cross_entropy(self.head(hidden), input_ids[:, 0])}

    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", False)  # it is True where CI is set
    fit(tmp_path, RecordingCallback(), Normed(), max_steps=1)
    told = [record.message for record in caplog.records if "not merged" in record.message]
    assert len(told) == 1 and "2 buffers (such as norm.running_mean)" in told[0]
