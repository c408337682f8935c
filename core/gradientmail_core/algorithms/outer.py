"""Outer optimizers: one step of the committed parameters along the merged delta.

A delta is *anchor minus local*, a descent direction, so every optimizer here subtracts it. All work in
place on flat fp32 arrays, block by block with a few blocks of scratch, elementwise operations only:
a step costs little more than reading and writing its arrays, and equal inputs give equal bytes on every
node and CPU. The state is named arrays of the fragment's size; the caller stores them and may restate
them through a codec (:func:`restated`), and the next step continues exactly from what was stored.

``version`` is the number of the commit being made, from 1, so it counts the steps of this fragment.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from gradientmail_core.algorithms.settings import Named, Settings, checked, named_from
from gradientmail_core.tensors import kernels
from gradientmail_core.tensors.codecs import Codec
from gradientmail_core.tensors.model import Flat


class Outer(Protocol):
    """A rule that moves committed parameters by a merged delta."""

    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays that :meth:`step` expects, in order; zeros before the first step."""
        ...

    def step(self, theta: Flat, delta: Flat, state: tuple[Flat, ...], version: int, participants: int = 1) -> None:
        """Move ``theta`` (fp32, flat) by ``delta`` in place, and the ``state`` arrays with it.

        ``version`` counts from 1; ``participants`` is the number of contributions in the round, used by
        optimizers whose learning rate scales with it.
        """
        ...

    def settings(self) -> Settings:
        """Plain JSON, read back by :func:`outer_from`."""
        ...


@dataclass(frozen=True, slots=True)
class Nesterov(Named):
    """SGD with Nesterov momentum, as in DiLoCo (arXiv 2311.08105) and ``torch.optim.SGD(nesterov=True)``.

    ``buf = mu*buf + delta``, ``theta -= lr*(delta + mu*buf)``. The momentum warms up with the fragment's
    version: commit ``v`` uses ``mu = min(momentum, (v-1)/(v-1+warmup))``, so that the first step is
    ``lr*delta`` and the average never looks further back than there are deltas; ``warmup=0`` is constant
    momentum. In steady state the gain is ``lr/(1-momentum)``, 7 times a delta at the defaults.

    ``scale_with_participants`` is an exponent: the learning rate is ``lr * participants**exponent``. The
    best outer rate grows with the number of nodes and not with the model (arXiv 2503.09799, about 0.6 at
    one or two nodes and 1.0 at eight, an exponent near 0.3); 0 leaves it alone.
    """

    lr: float = 0.7
    momentum: float = 0.9
    warmup: float = 10.0
    scale_with_participants: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.lr, self.scale_with_participants)
        checked("momentum", self.momentum, 0.0, 1.0)
        checked("warmup", self.warmup, 0.0)

    def state_names(self) -> tuple[str, ...]:
        """One array: ``momentum``."""
        return ("momentum",)

    def step(self, theta: Flat, delta: Flat, state: tuple[Flat, ...], version: int, participants: int = 1) -> None:
        """See :meth:`Outer.step`."""
        (buffer,) = state
        lr = np.float32(self.lr * scale(participants, self.scale_with_participants))
        mu = np.float32(warmed(self.momentum, version, self.warmup))

        def block(start: int, stop: int) -> None:
            part, change = buffer[start:stop], np.empty(stop - start, np.float32)
            np.multiply(part, mu, out=part)
            np.add(part, delta[start:stop], out=part)
            np.multiply(part, mu, out=change)
            np.add(change, delta[start:stop], out=change)
            np.multiply(change, lr, out=change)
            np.subtract(theta[start:stop], change, out=theta[start:stop])

        kernels.for_blocks(theta.size, block)


_KNOWN: Mapping[str, type[Named]] = {kind.__name__: kind for kind in (Nesterov,)}


def outer_settings(outer: Outer) -> Settings:
    """The outer optimizer as plain JSON, for the manifest."""
    return outer.settings()


def outer_from(settings: Mapping[str, Any]) -> Outer:
    """The outer optimizer that ``settings`` describes; :class:`ConfigurationError` if there is none such."""
    return cast(Outer, named_from(settings, _KNOWN, "outer optimizer"))


def warmed(momentum: float, version: int, warmup: float) -> float:
    """The momentum of commit ``version``: ``min(momentum, k/(k+warmup))`` with ``k = version - 1`` commits before."""
    before = version - 1
    return momentum if warmup == 0.0 else min(momentum, before / (before + warmup))


def scale(participants: int, exponent: float) -> float:
    """``participants**exponent`` to within 1e-5, from square roots and products only.

    Those are rounded alike on every machine; a library's ``pow`` is not.
    """
    result, root = 1.0, float(max(participants, 1))
    for _ in range(int(exponent)):
        result *= root
    fraction = exponent - int(exponent)
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
    kernels.for_blocks(values.size, lambda start, stop: codec.decode(parts, start, stop, values[start:stop]))


def _check_rate(lr: float, exponent: float) -> None:
    checked("lr", lr, 0.0)
    checked("scale_with_participants", exponent, 0.0, 2.0)
