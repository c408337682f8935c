"""Tiny models, data and trainers to run the callback in, with a session that only takes notes."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.tensors.model import Model
from gradientmail_hf import GradientMailCallback
from tests.sessions import RecordingSession

VOCABULARY, LENGTH = 32, 6


def config(**changes: Any) -> LlamaConfig:
    """A Llama of one layer and some 2,000 parameters."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaConfig(**{**sizes, **changes})


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Its model, equal for equal seeds."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config(**changes))


def rows(count: int = 32, length: int = LENGTH) -> Any:
    """``count`` texts; the first token but one tells which."""
    texts = []
    for number in range(count):
        ids = torch.arange(length) % 7 + 3
        ids[0], ids[1] = number % VOCABULARY, number // VOCABULARY
        texts.append({"input_ids": ids, "labels": ids.clone()})
    return texts


class Stream(IterableDataset[Any]):
    """Rows in order, as many as there are, again from the start each epoch."""

    def __init__(self, count: int = 1000) -> None:
        self.count = count

    def __iter__(self) -> Any:
        yield from rows(self.count)


class Sized(Stream):
    """The same with a length."""

    def __len__(self) -> int:
        return self.count


def number_of(ids: torch.Tensor) -> list[int]:
    """Which rows a batch holds."""
    return [int(row[0]) + VOCABULARY * int(row[1]) for row in ids]


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    """Eight steps of four rows on the CPU, without bar, logs or checkpoints."""
    quiet: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return TrainingArguments(**{**quiet, **changes})


class RecordingCallback(GradientMailCallback):
    """The real callback with a session that only takes notes; ``sessions`` holds one for each training."""

    def __init__(
        self,
        commits: dict[int, float] | None = None,
        fail_at: int | None = None,
        shares: dict[int, int] | None = None,
        start: int = 0,
        **options: Any,
    ) -> None:
        settings = DiLoCo(global_batch_size=8) if shares else DiLoCo()
        super().__init__(mailbox="memory://", **{"algorithm": settings, "node": "a", **options})
        self.sessions: list[RecordingSession] = []
        self.commits, self.fail_at, self.shares = commits, fail_at, shares or {}
        self.start = start

    def _open_session(self, model: Model) -> Any:
        session = RecordingSession(model, self.commits)
        session.fail_at, session.shares, session.start = self.fail_at, self.shares, self.start
        self.sessions.append(session)
        return session

    @property
    def recorded(self) -> RecordingSession:
        """The only session there was."""
        assert len(self.sessions) == 1
        return self.sessions[0]


class Reading(Trainer):
    """Notes the rows of each batch it trains on; fails on the batches in ``failures``."""

    def __init__(self, *args: Any, failures: dict[int, BaseException] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.read: list[list[int]] = []
        self.failures = failures or {}

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        number = len(self.read)
        if number in self.failures:
            raise self.failures.pop(number)
        self.read.append(number_of(inputs["input_ids"]))
        return super().training_step(model, inputs, *args, **options)


def trainer(folder: Path | str, callback: Any, model: Any = None, data: Any = None, **options: Any) -> Reading:
    """A trainer with the callback; options that the trainer does not know are its arguments'."""
    names = ["eval_dataset", "failures", "model_init", "optimizers"]
    own: dict[str, Any] = {name: options.pop(name) for name in names if name in options}
    callbacks = callback if isinstance(callback, list) else [callback]
    if "model_init" not in own:
        own["model"] = llama() if model is None else model
    return Reading(
        args=arguments(folder, **options), train_dataset=rows() if data is None else data, callbacks=callbacks, **own
    )


def fit(folder: Path | str, callback: Any, *args: Any, **options: Any) -> Reading:
    """Train, and return the trainer."""
    made = trainer(folder, callback, *args, **options)
    made.train()
    return made
