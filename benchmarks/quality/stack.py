"""Many nodes as one computation: the plain loop of :mod:`benchmarks.quality.trial`, at about half its time.

The demo's model is so small that calling operations costs one node about as much as what they compute. Here every
node's parameters are one row of one tensor and each operation works on all rows. Rows share nothing: the loss is
the sum of the nodes' losses, gradients are clipped row by row, AdamW is elementwise. The nodes' modules are views
of their rows, so merging, writing back and evaluating are the plain loop's own code, and a test holds the two
equal to fp32 rounding.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.quality.trial import Node, Training, Trial, inner_optimizer
from gradientmail_lightning.demo.model import BYTES, ByteGPT, rotated

NODES_AT_ONCE = 16
"""Parameters, gradients and moments of this many nodes are 30 MB; more gain nothing."""

EPSILON = torch.finfo(torch.float32).eps
"""Of ``nn.RMSNorm``."""

Weights = Mapping[str, Tensor]
"""Parameters by their name in the module, with one more dimension in front: the nodes."""


class Stack:
    """Nodes that step together. From here on their modules' parameters are views of :attr:`parameters`.

    ``compiled`` fuses operations with ``torch.compile``: a fifth faster, after a minute for each number of nodes;
    it needs a C++ compiler.
    """

    def __init__(self, trial: Trial, nodes: Sequence[Node], compiled: bool = False) -> None:
        self._nodes, self._size = nodes, trial.size
        self._example = nodes[0].module
        self.parameters = torch.stack([_flattened(node.module) for node in nodes]).requires_grad_()
        ends = accumulate((value.numel() for value in self._example.parameters()), initial=0)
        self._spans = [slice(start, stop) for start, stop in pairwise(ends)]
        for node, row in zip(nodes, self.parameters.detach(), strict=True):
            for span, value in zip(self._spans, node.module.parameters(), strict=True):
                value.data = row[span].view(value.shape)
        self._optimizer, self._schedule = inner_optimizer([self.parameters], trial)
        self._losses = torch.compile(self.losses, dynamic=False) if compiled else self.losses

    def step(self) -> None:
        """One optimizer step of every node, each on its own next batch."""
        self._optimizer.zero_grad()
        windows = torch.stack([node.batch() for node in self._nodes])
        self._losses(windows).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        _clip_rows(self.parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()

    def losses(self, windows: Tensor) -> Tensor:
        """Each node's loss, (nodes,), on its windows, (nodes, batch, time + 1)."""
        logits = _logits(self._weights(), self._example, windows[..., :-1])
        each = F.cross_entropy(logits.flatten(0, 1), windows[..., 1:].flatten(), reduction="none")
        return each.view(len(self._nodes), -1).mean(1)

    def _weights(self) -> Weights:
        pieces = torch.split(self.parameters, [span.stop - span.start for span in self._spans], dim=1)
        return {
            name: piece.view(len(self._nodes), *value.shape)
            for (name, value), piece in zip(self._example.named_parameters(), pieces, strict=True)
        }


def run_together(trials: Sequence[Trial], compiled: bool = False) -> list[dict[str, object]]:
    """The rows of trials that :func:`stacks` put together; each gets its nodes' share of the time."""
    torch.set_num_threads(1)
    started, trainings = time.process_time(), [Training(trial) for trial in trials]
    stack = Stack(trials[0], [node for training in trainings for node in training.nodes], compiled)
    for step in range(1, trials[0].steps + 1):
        stack.step()
        for training in trainings:
            training.after(step)
    each = (time.process_time() - started) / sum(trial.nodes for trial in trials)
    return [training.row(each * training.trial.nodes) for training in trainings]


def stacks(trials: Iterable[Trial], nodes_max: int = NODES_AT_ONCE) -> Iterator[list[Trial]]:
    """Neighbours in the plan that train the same model alike, as many as have ``nodes_max`` nodes, at least one."""
    together: list[Trial] = []
    for trial in trials:
        full = sum(other.nodes for other in together) + trial.nodes > nodes_max
        if together and (full or _inner(trial) != _inner(together[0])):
            yield together
            together = []
        together.append(trial)
    if together:
        yield together


def _inner(trial: Trial) -> tuple[object, ...]:
    return trial.size, trial.steps, trial.batch, trial.lr, trial.lr_warmup


def _flattened(module: ByteGPT) -> Tensor:
    return torch.cat([value.detach().flatten() for value in module.parameters()])


def _clip_rows(parameters: Tensor, norm_max: float) -> None:
    """``clip_grad_norm_`` for each row as a model of its own."""
    gradient = parameters.grad
    assert gradient is not None
    norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
    gradient.mul_((norm_max / (norms + 1e-6)).clamp(max=1.0))


def _logits(weights: Weights, example: ByteGPT, text: Tensor) -> Tensor:
    """:class:`ByteGPT`'s logits, (nodes, batch * time, 256), of every node for its text, (nodes, batch, time)."""
    nodes, _, time = text.shape
    embedding = weights["embedding.weight"]
    rows = text.flatten(1) + BYTES * torch.arange(nodes)[:, None]
    x = F.embedding(rows, embedding.flatten(0, 1))
    for number, block in enumerate(example.blocks):
        own = {name: weights[f"blocks.{number}.{name}"] for name, _ in block.named_parameters()}
        q, k, v = _heads(_linear(_normed(x, own["attention_norm.weight"]), own["qkv.weight"]), text, example)
        cos, sin = example.cos[:time], example.sin[:time]
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + _linear(mixed.transpose(1, 2).reshape(x.shape), own["attention_out.weight"])
        hidden = F.gelu(_linear(_normed(x, own["feed_norm.weight"]), own["feed_in.weight"]))
        x = x + _linear(hidden, own["feed_out.weight"])
    return _linear(_normed(x, weights["norm.weight"]), embedding)


def _heads(qkv: Tensor, text: Tensor, example: ByteGPT) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (nodes * batch, heads, time, head width)."""
    nodes, batch, time = text.shape
    head_width = 2 * example.cos.shape[-1]
    q, k, v = qkv.view(nodes * batch, time, 3, -1, head_width).permute(2, 0, 3, 1, 4)
    return q, k, v


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x``, (nodes, rows, in), through each node's matrix, (nodes, out, in)."""
    return torch.bmm(x, weight.mT)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight[:, None, :]
