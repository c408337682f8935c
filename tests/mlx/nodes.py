"""A tiny Llama, data for it, and mlx-lm's ``train`` around a session that only takes notes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.models import llama
from mlx_lm.tuner.trainer import TrainingArgs

from gradientmail_core.adapters.mlx import MlxModel
from tests.mlx.shapes import SIZES, VOCABULARY
from tests.sessions import RecordingSession


def tiny_llama(seed: int = 0) -> Any:
    """What all nodes train."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(model_type="llama", **SIZES))
    mx.eval(model.parameters())
    return model


class Bigram(nn.Module):  # type: ignore[misc]  # mlx leaves it untyped
    """The smallest model there is, for tests that compile: each kernel costs a second on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def __call__(self, tokens: Any) -> Any:
        return self.table(tokens)


def counting(rows: int = 24, length: int = 8, start: int = 0) -> list[tuple[list[int], int]]:
    """Rows that count upwards from a random number, with the offset that mlx-lm wants beside them."""
    noise = np.random.default_rng(start)
    firsts = noise.integers(0, VOCABULARY, rows)
    return [([int(first + step) % VOCABULARY for step in range(length)], 0) for first in firsts]


class Notes(RecordingSession):
    """The session that takes notes, as far as this plugin looks into one."""

    node = "a"

    @property
    def joined(self) -> bool:
        return ("join",) in self.calls and not self.ended

    @property
    def ended(self) -> bool:
        return bool({"close", "abort"} & {call[0] for call in self.calls})

    def close(self) -> None:
        if not self.ended:
            super().close()

    def abort(self, reason: str = "aborted") -> None:
        if not self.ended:
            super().abort(reason)


class Reports:
    """A training callback that keeps what it is told."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.train: list[dict[str, Any]] = []
        self.val: list[dict[str, Any]] = []
        self.fail_at = fail_at

    def on_train_loss_report(self, info: dict[str, Any]) -> None:
        self.train.append(info)
        if info["iteration"] == self.fail_at:
            raise ZeroDivisionError("the report fails")

    def on_val_loss_report(self, info: dict[str, Any]) -> None:
        self.val.append(info)


class Seen:
    """An ``iterate_batches`` of the user's own that notes what it is asked for and what it gives."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.sizes: list[int] = []
        self.rows: list[int] = []
        self.first: list[list[int]] = []

    def __call__(self, *, batch_size: int, loop: bool = False, **rest: Any) -> Iterator[Any]:
        if loop:
            self.sizes.append(batch_size)
        for batch in self.inner(batch_size=batch_size, loop=loop, **rest):
            if loop:
                self.rows.append(batch[0].shape[0])
                self.first.append(batch[0][:, 0].tolist())
            yield batch


@dataclass
class Node:
    """One node's training: ``train`` is ours or mlx-lm's."""

    directory: Path
    iters: int = 6
    options: dict[str, Any] = field(default_factory=dict)
    model: Any = field(default_factory=lambda: tiny_llama())
    optimizer: Any = field(default_factory=lambda: optim.Adam(learning_rate=1e-2))

    def __post_init__(self) -> None:
        self.session = Notes(MlxModel(self.model))
        self.args = TrainingArgs(
            **{
                "batch_size": 4,
                "iters": self.iters,
                "steps_per_report": 2,
                "steps_per_eval": 1000,
                "val_batches": 1,
                "max_seq_length": 16,
                "adapter_file": str(self.directory / "adapters.safetensors"),
                **self.options,
            }
        )

    @property
    def file(self) -> dict[str, Any]:
        """What mlx-lm wrote at the end."""
        return dict(mx.load(self.args.adapter_file))  # type: ignore[arg-type]  # mlx types what any file may hold

    @property
    def tensors(self) -> dict[str, Any]:
        """The model's parameters as they are."""
        return dict(self.session.model.keep())  # type: ignore[attr-defined]  # of the MLX adapter
