"""One training run of several nodes in one plain loop: the library's arithmetic without its mailbox.

Nodes hold the demo's model and take turns, each on its own shuffle of the same text. Every ``sync_every`` steps
their deltas go through the codec, the merge and the outer optimizer that real runs use, on the flat buffers of
the same adapter, and everyone goes on from the result (DiLoCo with a barrier and one fragment). The inner rate
is constant after its warm-up, so a run of 3000 steps holds the runs of 300 and 1000 steps as its beginning.
"""

import dataclasses
import hashlib
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.algorithms.merge import Contribution, Merge, Merged, Rda, merge_from
from gradientmail_core.algorithms.outer import Nesterov, Outer, outer_from
from gradientmail_core.algorithms.partition import ByBytes
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.encoded import InMemory
from gradientmail_core.tensors.error_feedback import Residual, compensated, residual_after
from gradientmail_core.tensors.kernels import subtract
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout
from gradientmail_lightning.demo.corpus import Corpus, Windows, read_corpus, sample
from gradientmail_lightning.demo.model import ByteGPT, ModelSize, held_out_loss, next_byte_loss

HELD_OUT_WINDOWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Everything that decides a run. ``outer`` None is one node alone, which merges nothing.

    ``feedback`` is the decay of the error feedback, None for none; ``outer`` and ``merge`` are settings as in
    a run's manifest. ``batch`` counts windows of ``context`` bytes, for each node and step.
    """

    study: str
    variant: str
    nodes: int
    steps: int
    seed: int
    sync_every: int = 20
    outer: Mapping[str, object] | None = field(default_factory=Nesterov(warmup=10.0).settings)
    merge: Mapping[str, object] = field(default_factory=Rda().settings)
    codec: str = "F32"
    feedback: float | None = None
    width: int = 64
    layers: int = 2
    context: int = 64
    batch: int = 4
    lr: float = 3e-3
    lr_warmup: int = 50

    @property
    def size(self) -> ModelSize:
        """The model's."""
        return ModelSize(self.width, self.layers, self.context)

    @property
    def node_steps(self) -> int:
        """Optimizer steps of all nodes: what a run costs."""
        return self.nodes * self.steps

    def fields(self) -> dict[str, object]:
        """The trial as JSON."""
        return dataclasses.asdict(self)


def run(trial: Trial) -> dict[str, object]:
    """The trial's row, by the plain loop: node after node, step after step."""
    torch.set_num_threads(1)
    started, training = time.process_time(), Training(trial)
    for step in range(1, trial.steps + 1):
        for node in training.nodes:
            node.step()
        training.after(step)
    return training.row(time.process_time() - started)


def is_evaluated(step: int) -> bool:
    """Whether the held-out loss is taken after ``step``: each 100, 200 and, beyond 3000, each 1000 steps."""
    return step % (100 if step <= 1000 else 200 if step <= 3000 else 1000) == 0


@cache
def corpus() -> Corpus:
    """The text, read once."""
    return read_corpus()


def text_digest() -> str:
    """The first digits of the sha256 of the text, which differs between versions of Python."""
    text = corpus()
    return hashlib.sha256(text.train.numpy().tobytes() + text.held_out.numpy().tobytes()).hexdigest()[:12]


def wire_bits(trial: Trial) -> float:
    """Bits of a delta for each parameter."""
    elements = TorchModel(ByteGPT(trial.size)).schema.elements
    return 8 * sum(part.nbytes for part in codec_named(trial.codec).parts(elements)) / elements


def inner_optimizer(parameters: Iterable[torch.Tensor], trial: Trial) -> tuple[AdamW, LambdaLR]:
    """The demo's AdamW and its warm-up."""
    optimizer = AdamW(parameters, lr=trial.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / trial.lr_warmup))


class Node:
    """One learner: a model, an inner optimizer, a shuffle of its own, and what its codec left out so far."""

    def __init__(self, trial: Trial, number: int) -> None:
        torch.manual_seed(trial.seed)
        self.name = f"node{number}"
        self.module = ByteGPT(trial.size)
        self.model = TorchModel(self.module)
        self.residual = Residual()
        self._optimizer, self._schedule = inner_optimizer(self.module.parameters(), trial)
        self._batches = _batches(trial, 1000 * trial.seed + number)

    def step(self) -> None:
        """One optimizer step."""
        self.step_on([self.batch()])

    def batch(self) -> torch.Tensor:
        """The node's next batch of windows (batch, context + 1)."""
        return next(self._batches)

    def step_on(self, batches: Sequence[torch.Tensor]) -> None:
        """One optimizer step on the mean gradient of these batches."""
        self._optimizer.zero_grad()
        for batch in batches:
            loss = next_byte_loss(self.module, batch) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()

    def contribution(self, trial: Trial, layout: FragmentLayout, theta: Flat) -> Contribution:
        """This node's delta against ``theta`` as the others see it, error feedback included."""
        codec = codec_named(trial.codec)
        delta = np.empty(layout.size, np.float32)
        self.model.read(layout, delta)
        subtract(theta, delta, delta)
        if trial.feedback is not None:
            compensated(delta, self.residual, delta, trial.feedback)
        parts = [np.empty(part.nbytes, np.uint8) for part in codec.parts(layout.size)]
        codec.encode(delta, parts)
        if trial.feedback is not None:
            self.residual = residual_after(delta, partial(codec.decode, parts))
        return Contribution(self.name, 1.0, InMemory(codec, parts).read)


def _batches(trial: Trial, seed: int) -> Iterator[torch.Tensor]:
    """Batches of windows (batch, context + 1), int64: one shuffle of the text after the other."""
    windows = Windows(corpus().train, trial.context + 1)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(windows), generator=generator).tolist()
        for start in range(0, len(order) - trial.batch + 1, trial.batch):
            yield torch.stack([windows[index] for index in order[start : start + trial.batch]])


class Training:
    """A trial under way: its nodes, what they committed, and what was seen of it so far."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.nodes = [Node(trial, number) for number in range(trial.nodes)]
        self._held_out = sample(corpus().held_out, trial.context + 1, HELD_OUT_WINDOWS)
        self._commits = None if trial.outer is None else _Commits(trial, self.nodes)
        self._losses: dict[str, float] = {}
        self._cosines: list[float] = []

    def after(self, step: int) -> None:
        """Merge and evaluate where it is time, when every node has made this step, from 1."""
        if self._commits is not None and step % self.trial.sync_every == 0:
            cosine = self._commits.merge().cosine
            self._cosines += [cosine] if cosine is not None else []
        if is_evaluated(step):
            self._losses[str(step)] = round(held_out_loss(self.nodes[0].module, self._held_out), 5)

    def row(self, cpu_seconds: float) -> dict[str, object]:
        """Held-out losses by step, wire bits per parameter, mean cosine of the last ten rounds, cost."""
        last = self._cosines[-10:]
        return {
            "trial": self.trial.fields(),
            "losses": self._losses,
            "bits_per_parameter": round(wire_bits(self.trial), 4),
            "cosine": round(sum(last) / len(last), 4) if last else None,
            "cpu_seconds": round(cpu_seconds, 1),
            "made_with": {"python": platform.python_version(), "torch": torch.__version__, "text": text_digest()},
        }


class _Commits:
    """The committed parameters and the outer state, moved by the nodes' deltas."""

    def __init__(self, trial: Trial, nodes: list[Node]) -> None:
        assert trial.outer is not None
        self._trial, self._nodes = trial, nodes
        (self._layout,) = ByBytes().layouts(nodes[0].model.schema, 1)
        self._merge: Merge = merge_from(trial.merge)
        self._outer: Outer = outer_from(trial.outer)
        self._theta = np.empty(self._layout.size, np.float32)
        nodes[0].model.read(self._layout, self._theta)
        self._state = tuple(np.zeros_like(self._theta) for _ in self._outer.state_names())
        self._version = 0

    def merge(self) -> Merged:
        """Merge, step, and let every node go on from the result."""
        self._version += 1
        given = [node.contribution(self._trial, self._layout, self._theta) for node in self._nodes]
        merged = self._merge(given, self._layout)
        self._outer.step(self._theta, merged.delta, self._state, self._version, len(given))
        for node in self._nodes:
            node.model.write(self._layout, self._theta)
        return merged
