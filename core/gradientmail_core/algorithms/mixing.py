"""Who mixes with whom, and what a mix is: the linear algebra of gossip, as pure functions.

A mix is a row-stochastic matrix over the nodes of a round's roster: every node replaces its vector by a plain mean
over itself and its partners. Partners follow from the roster's seed and members alone, so all nodes draw the same
graph without asking each other. A partner that does not answer leaves the row, whose weights are renormalised over
those who did (a plain mean of fewer vectors), so every row always sums to 1 and no vector is ever invented.

The contraction of a mix is ``rho = E|Wx|^2 / |x|^2`` for a vector of deviations from the mean over the nodes. Both
kinds of partial mix draw a fresh permutation of the M nodes each time:

* :class:`Pair` matches neighbours of the permutation, a perfect matching for even M. With an odd M one node keeps its
  own vector.
* :class:`Peers` closes the permutation to a ring; a node takes the ``k`` next ones. The matrix is doubly stochastic,
  for any M.

For both ``rho = (1 - k/(M-1)) / (k+1)`` in closed form (``k = 1`` for a pair, even M). Measured over 4000
permutations from the seeds the engine uses (``tests/core/algorithms/test_mixing.py`` measures it again):

| M | Pair | Peers(1) | Peers(2) | Peers(3) |
|--:|--:|--:|--:|--:|
| 4 | 0.333 | 0.333 | 0.111 | 0 |
| 8 | 0.429 | 0.429 | 0.238 | 0.143 |
| 16 | 0.467 | 0.467 | 0.289 | 0.200 |

``rounds`` mixes one after the other contract by ``rho**rounds``. :class:`All` has ``rho = 0``, :class:`Nothing` 1.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.algorithms.settings import Named, Settings, named_from
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.kernels import for_blocks, scratch, sum_blocks
from gradientmail_core.tensors.model import Flat

Decode: TypeAlias = Callable[[int, int, Flat], None]
"""``decode(start, stop, out)`` writes elements ``start`` to ``stop`` of a node's vector into ``out`` (fp32)."""


@dataclass(frozen=True, slots=True)
class All(Named):
    """The mean over every node of the roster, reduced by one averager for each fragment."""


@dataclass(frozen=True, slots=True)
class Nothing(Named):
    """Every node keeps its own vector."""


@dataclass(frozen=True, slots=True)
class Pair(Named):
    """The mean of two: a random matching of the nodes."""


@dataclass(frozen=True, slots=True)
class Peers(Named):
    """The mean of a node and the ``k`` next ones on a random ring; fewer where there are not so many others."""

    k: int = 2

    def __post_init__(self) -> None:
        if type(self.k) is not int or not 1 <= self.k <= 1000:
            raise ConfigurationError(f"Peers(k={self.k!r}).", "Use a whole number of peers from 1 to 1000.")


Mix: TypeAlias = All | Nothing | Pair | Peers

_KNOWN: tuple[type[Mix], ...] = (All, Nothing, Pair, Peers)


def mix_settings(mix: Mix) -> Settings:
    """The mix as plain JSON, for the manifest."""
    return mix.settings()


def mix_from(settings: Mapping[str, object]) -> Mix:
    """The mix that ``settings`` describes; :class:`ConfigurationError` if there is none such."""
    return named_from(settings, _KNOWN, "mix")


def permuted(seed: str, stage: int, nodes: Sequence[str]) -> tuple[str, ...]:
    """``nodes`` in the order of a permutation that ``seed`` and ``stage`` draw, whatever order they came in."""

    def place(node: str) -> bytes:
        return hashlib.sha256(f"{seed}/{stage}/{node}".encode()).digest()

    return tuple(sorted(nodes, key=lambda node: (place(node), node)))


def partners(mix: Mix, node: str, nodes: Sequence[str], seed: str, stage: int = 0) -> tuple[str, ...]:
    """Whose vectors ``node`` takes into its mean besides its own, in name order; none if it is not of ``nodes``."""
    if node not in nodes:
        return ()
    match mix:
        case Nothing():
            return ()
        case All():
            return tuple(sorted(other for other in nodes if other != node))
        case Pair():
            order = permuted(seed, stage, nodes)
            other = order.index(node) ^ 1
            return (order[other],) if other < len(order) else ()
        case Peers(k=k):
            order = permuted(seed, stage, nodes)
            here = order.index(node)
            reach = min(k, len(order) - 1)
            return tuple(sorted(order[(here + step) % len(order)] for step in range(1, reach + 1)))
        case _:
            assert_never(mix)


def row(node: str, answered: Sequence[str]) -> dict[str, float]:
    """The weights of ``node``'s mean when these partners answered: equal, and summing to 1."""
    members = sorted({node, *answered})
    return {member: 1.0 / len(members) for member in members}


def matrix(mix: Mix, nodes: Sequence[str], seed: str, stage: int = 0) -> NDArray[np.float64]:
    """The mix as a row-stochastic matrix over ``nodes``, when everyone answers."""
    index = {node: position for position, node in enumerate(nodes)}
    weights = np.zeros((len(nodes), len(nodes)))
    for node in nodes:
        for member, weight in row(node, partners(mix, node, nodes, seed, stage)).items():
            weights[index[node], index[member]] = weight
    return weights


def contraction(mix: Mix, nodes: int, rounds: int = 1) -> float:
    """``rho`` of the module's docstring for that many nodes, in closed form; an odd one out counts in full."""
    match mix:
        case All():
            return 0.0
        case Nothing():
            return 1.0
        case _ if nodes < 2:
            return 1.0
        case Pair() if nodes % 2:
            return _of_peers(1, nodes + 1) * (nodes + 1) / nodes
        case Pair():
            return float(_of_peers(1, nodes) ** rounds)
        case Peers(k=k):
            return float(_of_peers(min(k, nodes - 1), nodes) ** rounds)
        case _:
            assert_never(mix)


def _of_peers(k: int, nodes: int) -> float:
    return (1.0 - k / (nodes - 1)) / (k + 1)


def mean_of(vectors: Sequence[Decode], out: Flat) -> None:
    """The plain mean of the vectors into ``out``, in the order given (node order), summed in fp64."""
    count = np.float64(len(vectors))

    def block(start: int, stop: int) -> None:
        total, values = scratch("mix.total", stop - start, np.float64), scratch("mix.values", stop - start, np.float32)
        total.fill(0.0)
        for decode in vectors:
            decode(start, stop, values)
            np.add(total, values, out=total)
        np.divide(total, count, out=total)
        np.copyto(out[start:stop], total, casting="same_kind")

    for_blocks(out.size, block)


def spread_about(vectors: Sequence[Decode], mean: Flat, count: int) -> float:
    """``mean over the vectors of |v - mean|^2`` over the first ``count`` elements, in fp64."""

    def block(start: int, stop: int) -> float:
        values, apart = scratch("mix.values", stop - start, np.float32), scratch("mix.apart", stop - start, np.float64)
        total = 0.0
        for decode in vectors:
            decode(start, stop, values)
            np.subtract(values, mean[start:stop], out=apart, dtype=np.float64)
            np.multiply(apart, apart, out=apart)
            total += float(np.add.reduce(apart[: max(count - start, 0)]))
        return total

    return sum_blocks(mean.size, block) / len(vectors) if vectors else 0.0


def divergence(outputs: Sequence[NDArray[np.float32]]) -> float:
    """The Jensen-Shannon distance of several nodes' outputs: 0 where all agree, at most ``sqrt(log(nodes))``.

    ``outputs`` are probabilities of shape (rows, classes). The square root of the mean over the rows of
    ``H(mean p) - mean H(p)``, natural logarithm (Lin 1991, for any number of distributions).
    """
    stacked = np.clip(np.asarray(outputs, np.float64), 0.0, None)
    stacked /= np.maximum(stacked.sum(-1, keepdims=True), 1e-300)
    together = _entropy(stacked.mean(0)) - _entropy(stacked).mean(0)
    return float(np.sqrt(max(float(together.mean()), 0.0)))


def _entropy(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    logarithms = np.log(np.maximum(probabilities, 1e-300))
    return -np.asarray((probabilities * logarithms).sum(-1))
