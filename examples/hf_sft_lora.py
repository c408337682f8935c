"""Supervised fine-tuning with TRL and LoRA: only the adapters travel, and all machines must hold the same base model.

    python examples/hf_sft_lora.py file:///shared/run [MODEL]

MODEL is a folder or a name on the Hub. Without it a tiny Llama is built, with equal weights everywhere.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from gradientmail_hf import DiLoCo, GradientMailCallback

STEPS = 40


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    words = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes))
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def questions() -> Dataset:
    sums = [(a, b) for a in range(20) for b in range(20)]
    return Dataset.from_list([{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in sums])


def main(mailbox: str, name: str | None = None) -> None:
    if name is None:
        model, tokenizer = tiny()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            tempfile.mkdtemp(),
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=10,
            save_strategy="no",
            bf16=False,
            report_to=[],
        ),
        train_dataset=questions(),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
        callbacks=[GradientMailCallback(mailbox, DiLoCo(sync_every=10, fragments=2))],
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
