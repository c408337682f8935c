"""Reinforcement learning with TRL's GRPO and a reward that is a rule: completions should be vowels.

    python examples/hf_grpo.py file:///shared/run

Each machine makes up its own answers to its own prompts; what they learn from their rewards is merged. The model is a
tiny Llama of single characters, built on the spot.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from gradientmail_hf import DiLoCo, GradientMailCallback

LETTERS, VOWELS, STEPS = "abcdefghijklmnopqrstuvwxyz", set("aeiou"), 12


def letters() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", *LETTERS]
    tokenizer = Tokenizer(
        models.WordLevel(vocab={word: number for number, word in enumerate(words)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def share_of_vowels(completions: list[str], **rest: object) -> list[float]:
    return [sum(letter in VOWELS for letter in text) / max(len(text), 1) for text in completions]


def main(mailbox: str) -> None:
    tokenizer = letters()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=1, **sizes)
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(config),
        reward_funcs=share_of_vowels,
        args=GRPOConfig(
            tempfile.mkdtemp(),
            max_steps=STEPS,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=8,
            learning_rate=1e-2,
            logging_steps=4,
            save_strategy="no",
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": letter} for letter in LETTERS]),
        processing_class=tokenizer,
        callbacks=[GradientMailCallback(mailbox, DiLoCo(sync_every=4, fragments=2))],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
