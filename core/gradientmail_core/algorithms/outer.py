"""Outer optimizers: one step of the committed parameters along the merged delta.

A delta is *anchor minus local*, a descent direction, so every optimizer here subtracts it. All work on
flat fp32 arrays, in place or into others, span by span with one span of scratch, elementwise operations only:
a step costs little more than reading and writing its arrays, and equal inputs give equal bytes on every
node and CPU. The state is named arrays of the fragment's size; the caller stores them and may restate
them through a codec (:func:`restated`), and the next step continues exactly from what was stored.

``version`` is the number of the commit being made, from 1, so it counts the steps of this fragment.

Every optimizer takes ``scale_with_participants``, an exponent: the learning rate of a round is
``lr * participants**exponent``, so ``lr`` is the rate with one participant. The best outer rate grows with
the number of nodes and with H and hardly with the model (arXiv 2503.09799: about 0.6 for one or two nodes,
about 1.0 for eight, which an exponent of 0.25 to 0.35 follows). 0, the default, leaves the rate alone;
:class:`~gradientmail_core.algorithms.merge.Rda` already keeps the norm of the delta when nodes come and go.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from gradientmail_core.algorithms.settings import Named, Settings, checked, named_from
from gradientmail_core.tensors.codecs import Codec
from gradientmail_core.tensors.kernels import SPAN, for_blocks, for_each, scratch
from gradientmail_core.tensors.model import Flat

add, subtract, multiply = np.add, np.subtract, np.multiply

STRETCH = 4 * SPAN


class Outer(Protocol):
    """A rule that moves committed parameters by a merged delta."""

    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays that :meth:`step` expects, in order; zeros before the first step."""
        ...

    def step(
        self,
        theta: Flat,
        delta: Flat,
        state: tuple[Flat, ...],
        version: int,
        participants: int = 1,
        into: "Reached | None" = None,
    ) -> None:
        """Move ``theta`` (fp32, flat) by ``delta``, and the ``state`` arrays with it.

        ``version`` counts from 1; ``participants`` is the number of contributions in the round. The result is
        written in place, or to the arrays of ``into``, whose ``theta`` may be ``delta``: then ``theta`` and
        ``state`` stay as they are, and the delta is used up.
        """
        ...

    def delta_between(self, before: "Reached", after: "Reached", version: int, participants: int = 1) -> Flat:
        """The delta that led from one commit to the next, ``version``, as far as rounding allows; a new array."""
        ...

    def settings(self) -> Settings:
        """Plain JSON, read back by :func:`outer_from`."""
        ...


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a commit left the parameters and the optimizer's state: flat fp32 arrays."""

    theta: Flat
    state: tuple[Flat, ...]


@dataclass(frozen=True, slots=True)
class Nesterov(Named):
    """SGD with Nesterov momentum, as in DiLoCo (arXiv 2311.08105) and ``torch.optim.SGD(nesterov=True)``.

    ``buf = mu*buf + delta``, ``theta -= lr*(delta + mu*buf)``. The momentum warms up with the fragment's
    version: commit ``v`` uses ``mu = min(momentum, (v-1)/(v-1+warmup))``, so that the first step is
    ``lr*delta`` and the average never looks further back than there are deltas; ``warmup=0`` is constant
    momentum. In steady state the gain is ``lr/(1-momentum)``, 7 times a delta at the defaults.

    The defaults, over :class:`~gradientmail_core.algorithms.merge.Rda`, are those that in the project's study (2, 4
    and 8 nodes, H of 20 and 100, 300 to 3000 steps; ``docs/performance.md``) never ended above one node alone and
    were the best, or within noise of it, in more situations than constant momentum, longer warm-ups and plain
    averaging. Plain averaging was better where few nodes merge often for long: two or four, every 20 steps, 3000
    steps.
    """

    lr: float = 0.7
    momentum: float = 0.9
    warmup: float = 3.0
    scale_with_participants: float = 0.0

    def __post_init__(self) -> None:
        _check_momentum(self.lr, self.momentum, self.warmup, self.scale_with_participants)

    def state_names(self) -> tuple[str, ...]:
        return ("momentum",)

    def step(
        self,
        theta: Flat,
        delta: Flat,
        state: tuple[Flat, ...],
        version: int,
        participants: int = 1,
        into: "Reached | None" = None,
    ) -> None:
        there = into or Reached(theta, state)
        (before,), (after,) = state, there.state
        lr = np.float32(self.lr * scale(participants, self.scale_with_participants))
        mu = np.float32(warmed(self.momentum, version, self.warmup))

        def span(part: slice, change: Flat) -> None:
            average, slope = after[part], delta[part]
            multiply(before[part], mu, average)
            add(average, slope, average)
            multiply(average, mu, change)
            add(change, slope, change)
            multiply(change, lr, change)
            subtract(theta[part], change, there.theta[part])

        _for_spans(theta.size, span)

    def delta_between(self, before: Reached, after: Reached, version: int, participants: int = 1) -> Flat:
        return _added_to_momentum(before, after, warmed(self.momentum, version, self.warmup))


@dataclass(frozen=True, slots=True)
class HeavyBall(Named):
    """SGD with classical momentum: ``buf = mu*buf + delta``, ``theta -= lr*buf`` (``torch.optim.SGD(momentum)``).

    The momentum warms up as :class:`Nesterov`'s does.
    """

    lr: float = 0.7
    momentum: float = 0.9
    warmup: float = 3.0
    scale_with_participants: float = 0.0

    def __post_init__(self) -> None:
        _check_momentum(self.lr, self.momentum, self.warmup, self.scale_with_participants)

    def state_names(self) -> tuple[str, ...]:
        return ("momentum",)

    def step(
        self,
        theta: Flat,
        delta: Flat,
        state: tuple[Flat, ...],
        version: int,
        participants: int = 1,
        into: "Reached | None" = None,
    ) -> None:
        there = into or Reached(theta, state)
        (before,), (after,) = state, there.state
        lr = np.float32(self.lr * scale(participants, self.scale_with_participants))
        mu = np.float32(warmed(self.momentum, version, self.warmup))

        def span(part: slice, change: Flat) -> None:
            average = after[part]
            multiply(before[part], mu, average)
            add(average, delta[part], average)
            multiply(average, lr, change)
            subtract(theta[part], change, there.theta[part])

        _for_spans(theta.size, span)

    def delta_between(self, before: Reached, after: Reached, version: int, participants: int = 1) -> Flat:
        return _added_to_momentum(before, after, warmed(self.momentum, version, self.warmup))


@dataclass(frozen=True, slots=True)
class SGD(Named):
    """No state: ``theta -= lr*delta``. At ``lr=1`` this is plain averaging (Local SGD, FedAvg)."""

    lr: float = 1.0
    scale_with_participants: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.lr, self.scale_with_participants)

    def state_names(self) -> tuple[str, ...]:
        return ()

    def step(
        self,
        theta: Flat,
        delta: Flat,
        state: tuple[Flat, ...],
        version: int,
        participants: int = 1,
        into: "Reached | None" = None,
    ) -> None:
        there = into or Reached(theta, state)
        lr = np.float32(self.lr * scale(participants, self.scale_with_participants))

        def span(part: slice, change: Flat) -> None:
            multiply(delta[part], lr, change)
            subtract(theta[part], change, there.theta[part])

        _for_spans(theta.size, span)

    def delta_between(self, before: Reached, after: Reached, version: int, participants: int = 1) -> Flat:
        lr = self.lr * scale(participants, self.scale_with_participants)
        moved: Flat = before.theta - after.theta
        if lr > 0:
            np.divide(moved, np.float32(lr), out=moved)
        return moved


@dataclass(frozen=True, slots=True)
class Adam(Named):
    """Adam on deltas (FedAdam, arXiv 2003.00295, whose betas and ``eps`` are the defaults), as ``torch.optim.Adam``.

    ``m += (1-beta1)*(delta-m)``, ``v = beta2*v + (1-beta2)*delta^2``, both corrected for their start at zero by
    ``version``; ``theta -= lr * m / (sqrt(v) + eps)``. A coordinate moves by about ``lr`` a round, so the rate is
    in units of parameters. DiLoCo found an outer Adam less stable than Nesterov.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3
    scale_with_participants: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.lr, self.scale_with_participants)
        checked("beta1", self.beta1, 0.0, _BELOW_ONE)
        checked("beta2", self.beta2, 0.0, _BELOW_ONE)
        checked("eps", self.eps, 1e-12)

    def state_names(self) -> tuple[str, ...]:
        return ("momentum", "variance")

    def step(
        self,
        theta: Flat,
        delta: Flat,
        state: tuple[Flat, ...],
        version: int,
        participants: int = 1,
        into: "Reached | None" = None,
    ) -> None:
        there = into or Reached(theta, state)
        (momentum, variance), (new_momentum, new_variance) = state, there.state
        lr = self.lr * scale(participants, self.scale_with_participants)
        rate = np.float32(lr / (1.0 - power(self.beta1, version)))
        spread = np.float32(math.sqrt(1.0 - power(self.beta2, version)))
        fresh1, beta2, fresh2 = np.float32(1.0 - self.beta1), np.float32(self.beta2), np.float32(1.0 - self.beta2)
        eps = np.float32(self.eps)

        def span(part: slice, change: Flat) -> None:
            mean, square, slope = new_momentum[part], new_variance[part], delta[part]
            subtract(slope, momentum[part], change)
            multiply(change, fresh1, change)
            add(momentum[part], change, mean)
            multiply(slope, slope, change)
            multiply(change, fresh2, change)
            multiply(variance[part], beta2, square)
            add(square, change, square)
            np.sqrt(square, change)
            np.divide(change, spread, change)
            add(change, eps, change)
            np.divide(mean, change, change)
            multiply(change, rate, change)
            subtract(theta[part], change, there.theta[part])

        _for_spans(theta.size, span)

    def delta_between(self, before: Reached, after: Reached, version: int, participants: int = 1) -> Flat:
        change: Flat = after.state[0] - before.state[0]
        np.divide(change, np.float32(1.0 - self.beta1), out=change)
        np.add(change, before.state[0], out=change)
        return change


_BELOW_ONE = math.nextafter(1.0, 0.0)
_KNOWN: tuple[type[Outer], ...] = (Nesterov, HeavyBall, SGD, Adam)


def outer_settings(outer: Outer) -> Settings:
    """The outer optimizer as plain JSON, for the manifest."""
    return outer.settings()


def without_memory(outer: Outer) -> SGD:
    """The step of a round that is nobody's beginning: the optimizer's rate times the delta, its state left as it is.

    Adam's rate is in units of parameters; in its place the delta itself is taken.
    """
    match outer:
        case Nesterov() | HeavyBall() | SGD():
            return SGD(outer.lr, outer.scale_with_participants)
        case _:
            return SGD(1.0)


def outer_from(settings: Mapping[str, object]) -> Outer:
    """The outer optimizer that ``settings`` describes; :class:`ConfigurationError` if there is none such."""
    return named_from(settings, _KNOWN, "outer optimizer")


def _added_to_momentum(before: Reached, after: Reached, mu: float) -> Flat:
    """What was added to a momentum that was first multiplied by ``mu``."""
    delta: Flat = before.state[0] * np.float32(-mu)
    np.add(delta, after.state[0], out=delta)
    return delta


def warmed(momentum: float, version: int, warmup: float) -> float:
    """The momentum of commit ``version``: ``min(momentum, k/(k+warmup))`` with ``k = version - 1`` commits before."""
    before = version - 1
    return momentum if warmup == 0.0 else min(momentum, before / (before + warmup))


def power(base: float, exponent: int) -> float:
    """``base**exponent`` for a whole exponent from 0, by squaring.

    Products are rounded alike on every machine; a library's ``pow`` is not.
    """
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result


def scale(participants: int, exponent: float) -> float:
    """``participants**exponent`` to within 1e-5, by products and square roots, for the reason of :func:`power`."""
    whole = int(exponent)
    base = float(max(participants, 1))
    result, root, fraction = power(base, whole), base, exponent - whole
    for _ in range(20):
        root, fraction = math.sqrt(root), fraction * 2.0
        if fraction >= 1.0:
            result, fraction = result * root, fraction - 1.0
    return result


def restated(values: Flat, codec: Codec) -> None:
    """Replace ``values`` by what a reader of their encoding would see: ``decode(encode(values))``, in place.

    The committing node calls this on a state kept below fp32, so that it goes on from the same numbers as
    every node that loads them.
    """
    if codec.lossless:
        return
    parts = [np.empty(part.nbytes, np.uint8) for part in codec.parts(values.size)]
    codec.encode(values, parts)
    for_blocks(values.size, lambda start, stop: codec.decode(parts, start, stop, values[start:stop]))


def _for_spans(size: int, step: Callable[[slice, Flat], None]) -> None:
    """Call ``step(part, scratch)`` for spans that together cover ``range(size)``, on threads.

    Steps are elementwise: where spans end moves no bit.
    """

    def stretch(index: int) -> None:
        change = cast(Flat, scratch("outer.change", SPAN, np.float32))
        for start in range(index * STRETCH, min((index + 1) * STRETCH, size), SPAN):
            stop = min(start + SPAN, size)
            step(slice(start, stop), change[: stop - start])

    for_each(-(-size // STRETCH), stretch)


def _check_rate(lr: float, exponent: float) -> None:
    checked("lr", lr, 0.0)
    checked("scale_with_participants", exponent, 0.0, 2.0)


def _check_momentum(lr: float, momentum: float, warmup: float, exponent: float) -> None:
    _check_rate(lr, exponent)
    checked("momentum", momentum, 0.0, _BELOW_ONE)
    checked("warmup", warmup, 0.0)
