"""A model directory and data as mlx-lm's command line loads them, made on the spot."""

import json
from pathlib import Path

from mlx_lm.utils import save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.mlx.nodes import tiny_llama
from tests.mlx.shapes import SIZES

WORDS = ["one", "two", "three", "four", "five", "six"]


def make_base(home: Path) -> None:
    """Write ``model`` and ``data`` below ``home``."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.save_pretrained(home / "model")
    save_model(home / "model", tiny_llama())
    (home / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    (home / "data").mkdir()
    rows = [json.dumps({"text": " ".join(WORDS[(first + step) % 6] for step in range(8))}) for first in range(12)]
    for name in ("train", "valid", "test"):
        (home / "data" / f"{name}.jsonl").write_text("\n".join(rows))


def command(base: Path, out: Path | str, *more: str) -> list[str]:
    """mlx-lm's arguments for a short training, and ``more``."""
    sizes = ["--iters", "8", "--batch-size", "2", "--num-layers", "2", "--steps-per-report", "4", "--val-batches", "1"]
    return ["--model", str(base / "model"), "--data", str(base / "data"), "--adapter-path", str(out), *sizes, *more]
