"""A tiny Llama trained from scratch on the sources of Python's standard library, by every machine that runs this file.

    python examples/hf_text.py file:///shared/run
    torchrun --nproc-per-node 2 examples/hf_text.py s3://bucket/run

The tokenizer has one token for each byte and is built on the spot. Start it on as many machines as you like, whenever
you like; the first creates the run.
"""

import os
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from gradientmail_hf import DiLoCo, GradientMailCallback

CONTEXT, STEPS = 32, 60


def byte_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def standard_library(tokenizer: PreTrainedTokenizerFast) -> Dataset:
    text = "".join(path.read_text("utf-8", "replace") for path in sorted(Path(os.__file__).parent.glob("[a-d]*.py")))
    tokens = tokenizer(text)["input_ids"]
    return Dataset.from_dict(
        {"input_ids": [tokens[at : at + CONTEXT] for at in range(0, len(tokens) - CONTEXT, CONTEXT)]}
    )


def main(mailbox: str) -> None:
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            tempfile.mkdtemp(),
            max_steps=STEPS,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=standard_library(tokenizer),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[GradientMailCallback(mailbox, DiLoCo(sync_every=20, fragments=4))],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
