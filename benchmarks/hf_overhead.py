"""What the callback adds to a step of the Hugging Face Trainer.

    python benchmarks/hf_overhead.py [--json FILE] [--rounds 6]

Trains one small Llama with the stock Trainer and with the callback by turns in one process, so that whatever else the
machine does meets both. The batch is chosen so that a stock step takes about 20 ms. The callback's node is alone in
its run and merges four fragments every 100 steps through a mailbox in memory: what its engine's thread computes
meanwhile counts too. Prints the median and the mean of all steps of either kind, each turn's first ten left out, the
ratio of the two kinds turn by turn, and what a step took on a processor: the training thread alone, and all threads
together. Those hardly depend on what else the machine does.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import gradientmail_core as gm
from gradientmail_hf import GradientMailCallback

STEPS, WARMUP, TARGET_SECONDS, LENGTH, VOCABULARY = 130, 10, 0.020, 64, 256
SETTINGS = gm.DiLoCo(sync_every=100, fragments=4)


class Noise(Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Stopwatch(TrainerCallback):
    """Seconds between the ends of successive steps, on the clock and on processors."""

    def __init__(self) -> None:
        self._last = self._last_thread = self._last_process = 0.0
        self.seconds: list[float] = []
        self.thread: list[float] = []
        self.process: list[float] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """One more step."""
        now, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        self.seconds.append(now - self._last)
        self.thread.append(thread - self._last_thread)
        self.process.append(process - self._last_process)
        self._last, self._last_thread, self._last_process = now, thread, process


def small_llama() -> LlamaForCausalLM:
    """Some 400,000 parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Turn:
    """The durations of one training's steps in seconds, and their means on processors, without the first ones."""

    seconds: list[float]
    thread: float
    process: float


def turn(batch: int, callbacks: Sequence[TrainerCallback], steps: int = STEPS) -> Turn:
    """Train once, and look at the watch."""
    torch.manual_seed(0)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=batch,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(small_llama(), args, train_dataset=Noise(), callbacks=[*callbacks, watch]).train()
    means = (statistics.fmean(spent[WARMUP:]) for spent in (watch.thread, watch.process))
    return Turn(watch.seconds[WARMUP:], *means)


def batch_for_target() -> int:
    """A batch size whose stock step takes about :data:`TARGET_SECONDS`."""
    small, large = (turn(batch, [], 30).thread for batch in (1, 9))
    each = max((large - small) / 8, 1e-5)
    return max(1, round(1 + (TARGET_SECONDS - small) / each))


def turns(batch: int, rounds: int) -> Iterator[tuple[Turn, Turn]]:
    """Steps without and with the callback, by turns; which goes first alternates."""
    for number in range(rounds):
        callback = GradientMailCallback(gm.MemoryMailbox(), SETTINGS, callbacks=[])
        order = [[], [callback]] if number % 2 == 0 else [[callback], []]
        measured = [turn(batch, callbacks) for callbacks in order]
        yield (measured[0], measured[1]) if number % 2 == 0 else (measured[1], measured[0])


def measured(rounds: int) -> dict[str, float]:
    """Milliseconds of a step of either kind, and by how many percent the callback's takes longer."""
    batch = batch_for_target()
    pairs = list(turns(batch, rounds))
    stock = [seconds for without, _ in pairs for seconds in without.seconds]
    ours = [seconds for _, with_it in pairs for seconds in with_it.seconds]
    ratios = [statistics.median(with_it.seconds) / statistics.median(without.seconds) for without, with_it in pairs]
    thread = [statistics.median(kind.thread for kind in kinds) for kinds in zip(*pairs, strict=True)]
    process = [statistics.median(kind.process for kind in kinds) for kinds in zip(*pairs, strict=True)]
    return {
        "batch": float(batch),
        "stock_median_ms": statistics.median(stock) * 1e3,
        "callback_median_ms": statistics.median(ours) * 1e3,
        "stock_mean_ms": statistics.fmean(stock) * 1e3,
        "callback_mean_ms": statistics.fmean(ours) * 1e3,
        "stock_thread_ms": thread[0] * 1e3,
        "callback_thread_ms": thread[1] * 1e3,
        "stock_process_ms": process[0] * 1e3,
        "callback_process_ms": process[1] * 1e3,
        "median_overhead_percent": (statistics.median(ratios) - 1) * 100,
        "mean_overhead_percent": (statistics.fmean(ours) / statistics.fmean(stock) - 1) * 100,
        "thread_overhead_percent": (thread[1] / thread[0] - 1) * 100,
        "process_overhead_percent": (process[1] / process[0] - 1) * 100,
    }


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    figures = measured(options.rounds)
    for name, value in figures.items():
        print(f"{name:28} {value:8.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
