"""TRL's trainers, with and without adapters: every step and token counted, prompts of each node its own."""

import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.hf.nodes import RecordingCallback, llama

QUIET: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each byte."""
    special = ["<pad>", "<s>", "</s>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def sft(folder, tokenizer, callback, **options):
    texts = Dataset.from_list([{"text": "a" * (number % 5 + 3)} for number in range(32)])
    adapters = options.pop("peft_config", None)
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **options}
    made = SFTTrainer(
        model=llama(vocab_size=len(tokenizer)),
        args=SFTConfig(str(folder), **QUIET, **settings),
        train_dataset=texts,
        processing_class=tokenizer,
        callbacks=[callback],
        peft_config=adapters,
    )
    fed = []
    compute_loss = made.compute_loss
    made.compute_loss = lambda model, inputs, **rest: (
        fed.append(inputs["input_ids"].numel()) or compute_loss(model, inputs, **rest)
    )
    made.train()
    return made, fed


def test_sft_counts_what_is_fed_to_the_model(tmp_path, tokenizer):
    callback = RecordingCallback(commits={4: 0.5})
    made, fed = sft(tmp_path, tokenizer, callback)
    assert callback.recorded.names == ["join", "step", "close"]
    assert len(fed) == 8
    assert callback.recorded.samples == [sum(fed[at : at + 2]) for at in range(0, 8, 2)]
    assert torch.all(made.model.lm_head.weight == 0.5)


def test_sft_counts_without_padding_if_the_trainer_does(tmp_path, tokenizer):
    callback = RecordingCallback()
    made, fed = sft(tmp_path, tokenizer, callback, include_num_input_tokens_seen="non_padding")
    assert sum(callback.recorded.samples) == made.state.num_input_tokens_seen < sum(fed)


def test_sft_with_lora_sends_adapters_only(tmp_path, tokenizer):
    callback = RecordingCallback(commits={4: 0.5})
    sft(tmp_path, tokenizer, callback, peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    names = [tensor.name for tensor in callback.recorded.model.schema.tensors]
    assert names == [f"model.layers.0.self_attn.q_proj.lora_{side}.default.weight" for side in "AB"]
    assert callback.recorded.model.frozen_fingerprint is not None


def grpo(folder, tokenizer, callback, watch=TrainerCallback, **options):
    settings = {"max_steps": 3, "per_device_train_batch_size": 4, "num_generations": 2, **options}
    asked = []

    def reward(prompts, completions, **rest):
        asked.extend(prompts)
        return [float(len(completion)) for completion in completions]

    made = GRPOTrainer(
        model=llama(vocab_size=len(tokenizer)),
        reward_funcs=reward,
        args=GRPOConfig(str(folder), **QUIET, max_completion_length=4, **settings),
        train_dataset=Dataset.from_list([{"prompt": chr(97 + number) * 3} for number in range(16)]),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.train()
    return made, asked


@pytest.mark.parametrize("accumulate", [1, 2])
def test_grpo_counts_prompts_and_completions(tmp_path, tokenizer, accumulate):
    callback = RecordingCallback(commits={3: 0.5})
    made, _ = grpo(tmp_path, tokenizer, callback, gradient_accumulation_steps=accumulate)
    assert callback.recorded.names == ["join", "step", "close"]
    assert len(callback.recorded.samples) == 3
    assert sum(callback.recorded.samples) == made.state.num_input_tokens_seen > 3 * 4 * 3 * accumulate
    assert torch.all(made.model.lm_head.weight == 0.5)


def test_grpo_asks_each_node_other_questions_in_groups(tmp_path, tokenizer):
    """Prompts come in groups of as many as there are generations, whatever the share of the batch is."""
    asked = {}
    for node in "ab":
        _, asked[node] = grpo(tmp_path, tokenizer, RecordingCallback(node=node, shares={0: 3}))
    assert asked["a"] != asked["b"]
    assert all(prompts[::2] == prompts[1::2] and len(prompts) == 12 for prompts in asked.values())
