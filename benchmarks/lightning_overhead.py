"""What the Lightning strategy adds to a training step of about 20 ms, merging included.

    python benchmarks/lightning_overhead.py [--json FILE]

Trains one model of 4 million parameters in short fits by turns, with the stock strategy and as the only node of a run
in a directory, with the default settings: a fragment is merged each 25 steps. A pair is one fit of each kind; the order
within a pair changes, so that a machine that warms up or is shared favours neither. Prints the median over the pairs
of the ratio of their mean step times, and the same for the process's CPU time, which other programs disturb less.
"""

import argparse
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

PAIRS, STEPS, WARM_UP = 6, 110, 10
WIDTH, LAYERS, BATCH = 1024, 4, 64


@dataclass(frozen=True, slots=True)
class StepTime:
    """Mean over the steps of one fit, in milliseconds: by the clock, and of the process's processors."""

    wall: float
    cpu: float


class Timer(Callback):
    """Times the steps of one fit after its first :data:`WARM_UP`, from the start of a batch to that of the next."""

    def __init__(self) -> None:
        self._began = self._ended = (0.0, 0.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Note the times; the batch after the last is not trained on."""
        self._ended = time.perf_counter(), time.process_time()
        if batch_idx == WARM_UP:
            self._began = self._ended

    def step_time(self) -> StepTime:
        """The mean step."""
        wall, cpu = (ended - began for began, ended in zip(self._began, self._ended, strict=True))
        steps = STEPS - 1 - WARM_UP
        return StepTime(wall / steps * 1e3, cpu / steps * 1e3)


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


def timed(strategy: Strategy, data: TensorDataset) -> StepTime:
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
    return timer.step_time()


def measured(folder: str) -> dict[str, float]:
    """Medians over the pairs."""
    data = TensorDataset(torch.rand(STEPS * BATCH, WIDTH))
    algorithm = DiLoCo()
    stock: list[StepTime] = []
    ours: list[StepTime] = []
    for pair in range(PAIRS):
        node = GradientMailStrategy(f"{folder}/{pair}", algorithm)
        turns = [(SingleDeviceStrategy("cpu"), stock), (node, ours)]
        for strategy, times in turns if pair % 2 else turns[::-1]:
            times.append(timed(strategy, data))
    pairs = list(zip(ours, stock, strict=True))
    return {
        "stock_step_ms": statistics.median(one.wall for one in stock),
        "added_percent": statistics.median(100 * (one.wall / other.wall - 1) for one, other in pairs),
        "added_cpu_percent": statistics.median(100 * (one.cpu / other.cpu - 1) for one, other in pairs),
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
    print(f"as a node:      {figures['added_percent']:+.1f} % time, {figures['added_cpu_percent']:+.1f} % CPU")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
