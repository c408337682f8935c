"""What carrying over a commit is worth: ``DiLoCo()`` against the same with ``Overwrite``, on the demo's model.

The engine itself plays each run on virtual time: every node has the real learner, closer and follower, trains a real
model, and has a link of its own to one store. So rounds take as long as they would, and nodes of different speed meet
in them as they would. A node's step takes ``STEP_SECONDS`` by its speed. All train for the same time, so a node of
speed 0.4 makes 0.4 times the steps. ``overwrite`` is ``DiLoCo.decoupled()``: a commit replaces what a node trained
while the round closed, and a snapshot that missed its round is lost. ``carry`` is ``DiLoCo()``.

Losses are held-out nats per byte of what was committed when the fastest node left. One node alone makes as many steps
as the fastest.

    python -m benchmarks.quality.carry plan             what is left to run, and its time here
    python -m benchmarks.quality.carry run [--limit N]  run what is missing; stop and resume at will
    python -m benchmarks.quality.carry table            the table, from the log alone
"""

import dataclasses
import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.quality.command import Study
from benchmarks.quality.tables import difference
from benchmarks.quality.trial import HELD_OUT_WINDOWS, Node, Trial, corpus, text_digest
from benchmarks.utilization import Link
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.mailbox.memory import MemoryMailbox
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.world import SimulatedNode, ToyModel, ended
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout
from gradientmail_lightning.demo.corpus import sample
from gradientmail_lightning.demo.model import held_out_loss

STUDY = "carry"
SEEDS = (0, 1, 2)
INTERVALS = (20, 60)
STEPS = 360
STEP_SECONDS = 0.5
BYTES_PER_SECOND = 100_000.0
ALONE, OVERWRITE, CARRY = "alone", "overwrite", "carry"
MIXES: Mapping[str, tuple[float, ...]] = {
    "1, 1": (1.0, 1.0),
    "1, 1, 1, 0.4": (1.0, 1.0, 1.0, 0.4),
    "1, 0.6, 0.4, 0.2": (1.0, 0.6, 0.4, 0.2),
}
SETTINGS: Mapping[str, DiLoCo] = {
    OVERWRITE: DiLoCo.decoupled(fragments=4, compression=None),
    CARRY: DiLoCo(fragments=4, compression=None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryTrial:
    """Everything that decides a run; ``algorithm`` as in a run's manifest, None for one node alone."""

    variant: str
    speeds: tuple[float, ...]
    sync_every: int
    seed: int
    algorithm: Mapping[str, object] | None
    steps: int = STEPS
    step_seconds: float = STEP_SECONDS
    bytes_per_second: float = BYTES_PER_SECOND

    @property
    def inner(self) -> Trial:
        """What a node trains, in the other studies' terms."""
        return Trial(study=STUDY, variant=self.variant, nodes=len(self.speeds), steps=self.steps, seed=self.seed)

    @property
    def node_steps(self) -> int:
        """Optimizer steps of all nodes: what a run costs."""
        return sum(round(self.steps * speed) for speed in self.speeds)

    def fields(self) -> dict[str, object]:
        """The trial as JSON."""
        return {**dataclasses.asdict(self), "speeds": list(self.speeds)}


def trials() -> Iterator[CarryTrial]:
    """Seed by seed, so that a table can be read before all is done."""
    for seed in SEEDS:
        yield CarryTrial(variant=ALONE, speeds=(1.0,), sync_every=0, seed=seed, algorithm=None)
        for interval in INTERVALS:
            for speeds in MIXES.values():
                for variant, settings in SETTINGS.items():
                    algorithm = replace(settings, sync_every=interval).shared_settings()
                    yield CarryTrial(
                        variant=variant, speeds=speeds, sync_every=interval, seed=seed, algorithm=algorithm
                    )


class Trained(ToyModel):
    """The demo's model under the simulated node: one of its steps is a real one."""

    def __init__(self, trial: Trial, number: int) -> None:
        self.node = Node(trial, number)
        self.schema = self.node.model.schema
        self.frozen_fingerprint = None

    def read(self, layout: FragmentLayout, out: Flat) -> None:
        """Copy a fragment out."""
        self.node.model.read(layout, out)

    def write(self, layout: FragmentLayout, values: Flat) -> None:
        """Copy a fragment in."""
        self.node.model.write(layout, values)

    def reset_optimizer(self) -> None:
        """Forget the inner optimizer's state."""
        self.node.model.reset_optimizer()

    def train(self, noise: np.random.Generator) -> None:
        """One optimizer step on the node's next batch."""
        self.node.step()


def run(trial: CarryTrial) -> dict[str, object]:
    """The trial's row: held-out loss, the share of tokens that was merged and dropped, cost."""
    torch.set_num_threads(1)
    started = time.process_time()
    found = run_virtually(lambda loop: _played(loop, trial)) if trial.algorithm is not None else _alone(trial)
    return {
        "trial": trial.fields(),
        **found,
        "cpu_seconds": round(time.process_time() - started, 1),
        "made_with": {"python": platform.python_version(), "torch": torch.__version__, "text": text_digest()},
    }


def _loss(trial: CarryTrial, node: Node) -> float:
    windows = sample(corpus().held_out, trial.inner.context + 1, HELD_OUT_WINDOWS)
    return round(held_out_loss(node.module, windows), 5)


def _alone(trial: CarryTrial) -> dict[str, object]:
    node = Node(trial.inner, 0)
    for _ in range(trial.steps):
        node.step()
    return {"loss": _loss(trial, node)}


async def _played(loop: VirtualLoop, trial: CarryTrial) -> dict[str, object]:
    shared, settings = MemoryMailbox("run"), replace(SETTINGS[trial.variant], sync_every=trial.sync_every)
    assert settings.shared_settings() == trial.algorithm
    nodes = []
    for number, speed in enumerate(trial.speeds):
        clock = VirtualClock(loop)
        node = SimulatedNode(
            f"n{number}", Link(shared, clock, trial.bytes_per_second), settings, clock, 100 * trial.seed + number,
            steps=round(trial.steps * speed), step_seconds=trial.step_seconds / speed, min_nodes=len(trial.speeds),
            tokens=trial.inner.batch, model=Trained(trial.inner, number),
        )  # fmt: skip
        nodes.append(node.launch())
    await ended(nodes)
    first = nodes[0].model
    assert isinstance(first, Trained)
    books = [account for node in nodes if node.learner is not None for account in node.learner.books]
    trained = sum(account.processed for account in books)
    return {
        "loss": _loss(trial, first.node),
        "merged": round(sum(account.merged for account in books) / trained, 4),
        "dropped": round(sum(account.dropped_tokens for account in books) / trained, 4),
    }


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line for each mix and interval; ``±`` as in :mod:`benchmarks.quality.tables`, of the paired difference."""
    alone: dict[int, float] = {}
    found: dict[tuple[int, tuple[float, ...]], dict[str, dict[int, Mapping[str, Any]]]] = defaultdict(dict)
    for row in rows:
        trial = row["trial"]
        if trial["variant"] == ALONE:
            alone[trial["seed"]] = row["loss"]
        else:
            place = found[trial["sync_every"], tuple(trial["speeds"])]
            place.setdefault(trial["variant"], {})[trial["seed"]] = row
    lines = [
        "| H | speeds | one node alone | `Overwrite` | `Carry` | difference | dropped | dropped, `Carry` | seeds |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|",
        *(_line(interval, speeds, sides, alone) for (interval, speeds), sides in sorted(found.items(), key=_place)),
    ]
    return "\n".join(lines)


def _place(item: tuple[tuple[int, tuple[float, ...]], object]) -> tuple[int, int]:
    interval, speeds = item[0]
    return interval, [*MIXES.values()].index(speeds)


def _line(
    interval: int,
    speeds: Sequence[float],
    sides: Mapping[str, Mapping[int, Mapping[str, Any]]],
    alone: Mapping[int, float],
) -> str:
    seeds = sorted(set.intersection(*(set(sides.get(side, {})) for side in (OVERWRITE, CARRY)), set(alone)))
    if not seeds:
        return f"| {interval} | {', '.join(f'{speed:g}' for speed in speeds)} | | | | | | | 0 |"
    losses = {side: {seed: sides[side][seed]["loss"] for seed in seeds} for side in (OVERWRITE, CARRY)}
    gap = difference(losses[CARRY], losses[OVERWRITE])
    dropped = [mean(sides[side][seed]["dropped"] for seed in seeds) for side in (OVERWRITE, CARRY)]
    cells = [
        str(interval),
        ", ".join(f"{speed:g}" for speed in speeds),
        f"{mean(alone[seed] for seed in seeds):.3f}",
        *(f"{mean(losses[side].values()):.3f}" for side in (OVERWRITE, CARRY)),
        f"{gap.mean:+.3f} ± {gap.spread:.3f}",
        *(f"{share:.0%}" for share in dropped),
        str(gap.seeds),
    ]
    return f"| {' | '.join(cells)} |"


def told(trial: CarryTrial, row: Mapping[str, Any]) -> str:
    """What came of a trial, in a line."""
    shown = {name: row[name] for name in ("loss", "merged", "dropped", "cpu_seconds") if name in row}
    return f"{trial.variant} H={trial.sync_every} {trial.speeds}: {shown}"


if __name__ == "__main__":
    Study(STUDY, trials, run, told, table).main(__doc__)
