"""The gossip study: what mixing less costs, on the demo's model, at equal tokens for everybody.

Eight nodes take turns in one loop. Each has the production learner (round, outer step and momentum are its own
code); between the learners stand the mixes of :mod:`gradientmail_core.algorithms.mixing` instead of a mailbox, all
in time. ``Sync-DP`` averages the gradients of every step instead, in one model. Losses are those of the mean of the
nodes' parameters; beside them stand what the nodes' own models lose on average, and how far they are apart.

    python -m benchmarks.quality.gossip plan            what is left to run, and its time here
    python -m benchmarks.quality.gossip run [--limit N] run what is missing; stop and resume at will
    python -m benchmarks.quality.gossip table           the table, from the log alone
    python -m benchmarks.quality.gossip smoke           every variant for two short rounds, written nowhere
"""

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.quality.command import Study
from benchmarks.quality.tables import difference
from benchmarks.quality.trial import HELD_OUT_WINDOWS, Node, Trial, corpus, text_digest
from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.algorithms.gossip import FactoredGossip, gossip_from, selected, selection
from gradientmail_core.algorithms.mixing import All, Decode, Mix, Pair, divergence, mean_of, partners
from gradientmail_core.algorithms.outer import Nesterov
from gradientmail_core.engine.gossip_learner import Answer, Begun, Ended, GossipLearner, Mixed, Rejoin
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout
from gradientmail_lightning.demo.corpus import sample
from gradientmail_lightning.demo.model import ByteGPT, held_out_loss

STUDY = "gossip"
SEEDS = (0, 1, 2)
NODES, STEPS, SYNC_EVERY = 8, 1000, 50
EVALUATIONS = 4
PROBED_WINDOWS = 8
SYNC_DP, DILOCO = "Sync-DP", "DiLoCo"
SLOW_WARMUP = ", warm-up 10"


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipTrial:
    """Everything that decides a run; ``algorithm`` as in a run's manifest, None for synchronous data parallelism."""

    variant: str
    seed: int
    algorithm: Mapping[str, object] | None
    nodes: int = NODES
    steps: int = STEPS
    width: int = 160
    layers: int = 4
    context: int = 64
    batch: int = 4
    lr: float = 1e-3
    lr_warmup: int = 50

    @property
    def inner(self) -> Trial:
        """What a node trains, in the other studies' terms."""
        return Trial(
            study=STUDY, variant=self.variant, nodes=self.nodes, steps=self.steps, seed=self.seed, width=self.width,
            layers=self.layers, context=self.context, batch=self.batch, lr=self.lr, lr_warmup=self.lr_warmup,
        )  # fmt: skip

    @property
    def node_steps(self) -> int:
        """Optimizer steps of all nodes: what a run costs."""
        return self.nodes * self.steps

    def fields(self) -> dict[str, object]:
        """The trial as JSON."""
        return dataclasses.asdict(self)


def variants(sync_every: int = SYNC_EVERY) -> dict[str, FactoredGossip | None]:
    """What is compared: the presets, and beside them what shows why they are so.

    DiLoCo is the mix of everything, which the tests hold equal to the engine's DiLoCo, with the outer optimizer that
    ``DiLoCo()`` has. What ends in "warm-up 10" has the outer optimizer that all presets had at first.
    """
    exact: dict[str, object] = {"fragments": 1, "follow": False, "delta_codec": "F32"}
    alone = FactoredGossip.global_m1(sync_every, **exact)
    everything = replace(alone, mix2=All(), outer=Nesterov())
    sensitive = FactoredGossip.global_m1_local_m2(sync_every, **exact)
    on_all, slowly = replace(sensitive, mix2_on=()), Nesterov(warmup=10.0)
    return {
        SYNC_DP: None,
        DILOCO: everything,
        "GlobalM1": alone,
        "GlobalM1LocalM2": sensitive,
        "GlobalM1LocalM2, three peers on all": on_all,
        "GlobalM1LocalM2, three peers twice on all": replace(on_all, rounds=2),
        "NoLoCo": FactoredGossip.noloco(sync_every, **exact),
        DILOCO + SLOW_WARMUP: replace(everything, outer=slowly),
        "GlobalM1LocalM2, three peers on all" + SLOW_WARMUP: replace(on_all, outer=slowly),
        "GlobalM1LocalM2" + SLOW_WARMUP: replace(sensitive, outer=slowly),
        "GlobalM1LocalM2, pairs" + SLOW_WARMUP: replace(sensitive, mix2=Pair(), outer=slowly),
        "GlobalM1, Nesterov" + SLOW_WARMUP: replace(alone, outer=slowly),
    }


def trials() -> Iterator[GossipTrial]:
    """Seed by seed, so that a table can be read before all is done."""
    for seed, (variant, settings) in itertools.product(SEEDS, variants().items()):
        algorithm = None if settings is None else settings.shared_settings()
        yield GossipTrial(variant=variant, seed=seed, algorithm=algorithm)


def run(trial: GossipTrial) -> dict[str, object]:
    """The trial's row: held-out losses of the mean and of the nodes by step, distances between nodes, cost."""
    torch.set_num_threads(1)
    started = time.process_time()
    row: dict[str, dict[str, float]] = {"losses": {}, "node_losses": {}, "l2": {}, "js": {}}
    work = _synchronous(trial) if trial.algorithm is None else _gossip(trial, gossip_from(trial.algorithm))
    for step, figures in work:
        for name, value in figures.items():
            row[name][str(step)] = round(value, 6)
    cost = {"cpu_seconds": round(time.process_time() - started, 1), "made_with": {"torch": torch.__version__}}
    return {"trial": trial.fields(), **row, **cost, "text": text_digest()}


def _evaluated_after(trial: GossipTrial, every: int) -> frozenset[int]:
    """Ends of rounds after which losses are taken, evenly over the run and at its end."""
    ends = range(every, trial.steps + 1, every)
    return frozenset(ends[:: -max(len(ends) // EVALUATIONS, 1)])


def _held_out(trial: GossipTrial) -> Sequence[torch.Tensor]:
    return sample(corpus().held_out, trial.context + 1, HELD_OUT_WINDOWS)


def _synchronous(trial: GossipTrial) -> Iterator[tuple[int, dict[str, float]]]:
    """One model that steps on the mean gradient of all nodes' batches."""
    nodes = [Node(trial.inner, number) for number in range(trial.nodes)]
    leader, held_out = nodes[0], _held_out(trial)
    evaluated = _evaluated_after(trial, SYNC_EVERY if trial.steps >= SYNC_EVERY else trial.steps)
    for step in range(1, trial.steps + 1):
        leader.step_on([node.batch() for node in nodes])
        if step in evaluated:
            loss = held_out_loss(leader.module, held_out)
            yield step, {"losses": loss, "node_losses": loss}


class _Fleet:
    """The learners of all nodes, and the mixes between them."""

    def __init__(self, trial: GossipTrial, settings: FactoredGossip) -> None:
        self.settings = settings
        self.nodes = [Node(trial.inner, number) for number in range(trial.nodes)]
        self.names = [node.name for node in self.nodes]
        schema = self.nodes[0].model.schema
        (self.layout,) = settings.partition.layouts(schema, 1)
        chosen = selection(self.layout, selected(schema, settings.mix2_on))
        self._spans = () if chosen is None else chosen.spans
        self._begun: dict[str, Begun] = {}
        self._ended: dict[str, Ended] = {}
        self._seed = trial.seed
        start = np.empty(self.layout.size, np.float32)
        self.nodes[0].model.read(self.layout, start)
        self.learners = [self._learner(node, start) for node in self.nodes]
        for learner in self.learners:
            learner.launch()

    def _learner(self, node: Node, start: Flat) -> GossipLearner:
        return GossipLearner(
            node.model,
            (self.layout,),
            self.settings,
            Rejoin(0, (start,)),
            begin=partial(self._begun.__setitem__, node.name),
            exchange=partial(self._ended.__setitem__, node.name),
            applied=lambda moved: None,
        )

    def round(self) -> None:
        """Every node's steps, with Mix1 beside them and Mix2 at their end."""
        number = self.learners[0].state.round
        starts = {name: begun.vectors[0] for name, begun in self._begun.items()}
        for name, learner in zip(self.names, self.learners, strict=True):
            mixed = self._mixed(self.settings.mix1, name, starts, number, 0)
            if mixed is not None:
                learner.deliver(Mixed(number, 0, mixed))
        for node, learner in zip(self.nodes, self.learners, strict=True):
            for _ in range(self.settings.sync_every):
                node.step()
                learner.step(1)
        self._answer(number)

    def _answer(self, number: int) -> None:
        gradients = {name: ended.gradients[0] for name, ended in self._ended.items() if ended.round == number}
        for stage in range(self.settings.rounds):
            gradients = {name: self._exchanged(name, gradients, number, stage) for name in gradients}
        for name, learner in zip(self.names, self.learners, strict=True):
            if name in gradients:
                learner.deliver(Answer(number, (gradients[name],), (), 0.0))
                learner.align()

    def _exchanged(self, name: str, gradients: Mapping[str, Flat], number: int, stage: int) -> Flat:
        """A node's gradient after one mix of those tensors that Mix2 takes."""
        own, mixed = gradients[name].copy(), self._mixed(self.settings.mix2, name, gradients, number, stage)
        if mixed is not None:
            for start, stop in self._spans:
                own[start:stop] = mixed[start:stop]
        return own

    def _mixed(self, mix: Mix, name: str, vectors: Mapping[str, Flat], number: int, stage: int) -> Flat | None:
        others = partners(mix, name, self.names, f"{self._seed:x}{number:08x}", stage)
        if not others:
            return None
        out = np.empty(self.layout.size, np.float32)
        mean_of([_decoder(vectors[member]) for member in sorted((name, *others))], out)
        return out

    def figures(self, mean_model: "_MeanModel", held_out: Sequence[torch.Tensor]) -> dict[str, float]:
        """Losses and distances at the start of a round."""
        starts = [self._begun[name].vectors[0] for name in self.names]
        centre = np.empty(self.layout.size, np.float32)
        mean_of([_decoder(start) for start in starts], centre)
        apart = [float(np.square(start.astype(np.float64) - centre).mean()) for start in starts]
        outputs = [_probabilities(node.module, held_out[0][:PROBED_WINDOWS]) for node in self.nodes]
        return {
            "losses": mean_model.loss(self.layout, centre, held_out),
            "node_losses": mean(held_out_loss(node.module, held_out) for node in self.nodes),
            "l2": float(np.sqrt(np.mean(apart))),
            "js": divergence(outputs),
        }


class _MeanModel:
    """A model of its own for the mean of the nodes' parameters."""

    def __init__(self, trial: GossipTrial) -> None:
        self._module = ByteGPT(trial.inner.size)
        self._model = TorchModel(self._module)

    def loss(self, layout: FragmentLayout, values: Flat, held_out: Sequence[torch.Tensor]) -> float:
        """The held-out loss of these parameters."""
        self._model.write(layout, values)
        return held_out_loss(self._module, held_out)


def _gossip(trial: GossipTrial, settings: FactoredGossip) -> Iterator[tuple[int, dict[str, float]]]:
    fleet, mean_model, held_out = _Fleet(trial, settings), _MeanModel(trial), _held_out(trial)
    evaluated = _evaluated_after(trial, settings.sync_every)
    for step in range(settings.sync_every, trial.steps + 1, settings.sync_every):
        fleet.round()
        if step in evaluated:
            yield step, fleet.figures(mean_model, held_out)


def _decoder(values: Flat) -> Decode:
    return lambda start, stop, out: np.copyto(out, values[start:stop])


@torch.no_grad()
def _probabilities(module: ByteGPT, windows: torch.Tensor) -> NDArray[np.float32]:
    """The next-byte distributions of a few windows, (rows, 256)."""
    return np.asarray(module(windows[:, :-1]).softmax(-1).reshape(-1, 256).numpy(), np.float32)


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line a variant: final loss of the mean, paired difference to DiLoCo, the nodes' own loss, distances.

    What has the slow warm-up is held against the DiLoCo that has it.
    """
    found: dict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        found[row["trial"]["variant"]][row["trial"]["seed"]] = row
    final = {
        variant: {seed: _last(row["losses"]) for seed, row in by_seed.items()} for variant, by_seed in found.items()
    }
    lines = [
        "| variant | held-out loss of the mean | against DiLoCo | of a node | L2 apart | JS apart | seeds |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for variant, losses in sorted(final.items(), key=lambda item: mean(item[1].values())):
        base = final.get(DILOCO + SLOW_WARMUP if variant.endswith(SLOW_WARMUP) else DILOCO, losses)
        gap, share = difference(losses, base), 100 / mean(base[seed] for seed in losses if seed in base)
        nodes = mean(_last(row["node_losses"]) for row in found[variant].values())
        apart = [[_last(row[name]) for row in found[variant].values() if row[name]] for name in ("l2", "js")]
        distances = [f"{mean(values):.2g}" if values else "" for values in apart]
        lines.append(
            f"| {variant} | {mean(losses.values()):.4f} | {share * gap.mean:+.2f} % ± {share * gap.spread:.2f} "
            f"| {nodes:.4f} | {distances[0]} | {distances[1]} | {len(losses)} |"
        )
    return "\n".join(lines)


def _last(series: Mapping[str, float]) -> float:
    return series[max(series, key=int)]


def smoke() -> list[dict[str, object]]:
    """Every variant on a small model for two short rounds."""
    rows = []
    for variant, settings in variants(sync_every=5).items():
        algorithm = None if settings is None else settings.shared_settings()
        small = GossipTrial(
            variant=variant, seed=0, algorithm=algorithm, nodes=4, steps=10, width=32, layers=3, context=32, batch=2
        )
        rows.append(run(small))
    return rows


def told(trial: GossipTrial, row: Mapping[str, Any]) -> str:
    """What came of a trial, in a line."""
    return f"{trial.variant} seed={trial.seed}: {row['losses']}"


if __name__ == "__main__":
    Study(STUDY, trials, run, told, table, {"smoke": lambda: table(smoke())}).main(__doc__)
