"""What the Lightning strategy adds to a training step of about 20 ms, merging included.

    python benchmarks/lightning_overhead.py [--json FILE]

Trains one model of 4 million parameters in short fits by turns, with the stock strategy and as the only node of a run
in a directory, with the default settings: a fragment is merged each 25 steps. A pair is one fit of each kind; the order
within a pair changes, so that a machine that warms up or is shared favours neither. A fit is cut into cycles of 25
steps, each with all that comes once in a cycle, and compared cycle by cycle with the other of its pair: so what else
the machine does for a moment spoils one ratio of many. Prints the median ratio and the middle half of them, for the
time by the clock and for the process's CPU time, which other programs disturb less.
"""

import argparse
import itertools
import json
import logging
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_lightning import DiLoCo, GradientMailStrategy

PAIRS, CYCLES, CYCLE, WARM_UP = 12, 4, 25, 10
STEPS = WARM_UP + CYCLES * CYCLE + 1
WIDTH, LAYERS, BATCH = 1024, 4, 64


@dataclass(frozen=True, slots=True)
class StepTime:
    """Mean over the steps of one cycle, in milliseconds: by the clock, and of the process's processors."""

    wall: float
    cpu: float


class Timer(Callback):
    """Times the cycles of one fit after its first :data:`WARM_UP` steps."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Note the times where a cycle begins."""
        if batch_idx >= WARM_UP and (batch_idx - WARM_UP) % CYCLE == 0:
            self._marks.append((time.perf_counter(), time.process_time()))

    def step_times(self) -> list[StepTime]:
        """The mean step of each cycle."""
        spans = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(self._marks)]
        return [StepTime(wall / CYCLE * 1e3, cpu / CYCLE * 1e3) for wall, cpu in spans]


class Regression(LightningModule):
    """Dense layers, trained to give nothing."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean square of the outputs."""
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the cheaper the step, the more an addition to it shows."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def timed(strategy: Strategy, data: TensorDataset) -> list[StepTime]:
    """One fit."""
    timer = Timer()
    trainer = Trainer(
        strategy=strategy,
        max_epochs=1,
        callbacks=[timer],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=BATCH))
    return timer.step_times()


def measured(folder: str) -> dict[str, float]:
    """Medians and quartiles over the cycles of all pairs."""
    data = TensorDataset(torch.rand(STEPS * BATCH, WIDTH))
    algorithm = DiLoCo()
    stock: list[StepTime] = []
    ours: list[StepTime] = []
    for pair in range(PAIRS):
        node = GradientMailStrategy(f"{folder}/{pair}", algorithm)
        turns = [(SingleDeviceStrategy("cpu"), stock), (node, ours)]
        for strategy, times in turns if pair % 2 else turns[::-1]:
            times += timed(strategy, data)
    pairs = list(zip(ours, stock, strict=True))
    wall = statistics.quantiles([100 * (one.wall / other.wall - 1) for one, other in pairs])
    cpu = statistics.quantiles([100 * (one.cpu / other.cpu - 1) for one, other in pairs])
    return {
        "stock_step_ms": statistics.median(one.wall for one in stock),
        **dict(zip(("added_percent_low", "added_percent", "added_percent_high"), wall, strict=True)),
        **dict(zip(("added_cpu_percent_low", "added_cpu_percent", "added_cpu_percent_high"), cpu, strict=True)),
    }


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = measured(folder)
    print(f"stock strategy: {figures['stock_step_ms']:.1f} ms a step")
    for name, what in (("added_percent", "time"), ("added_cpu_percent", "CPU")):
        low, middle, high = (figures[name + end] for end in ("_low", "", "_high"))
        print(f"as a node:      {middle:+.1f} % {what} (middle half of the cycles: {low:+.1f} to {high:+.1f} %)")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
