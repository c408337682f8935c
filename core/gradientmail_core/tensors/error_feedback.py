"""Error feedback: what a lossy codec left out of one snapshot is added to the next one.

A learner sends ``Q(u)`` with ``u = delta + decay·e`` and keeps ``e = u − Q(u)``. The sum of all it sent then
differs from the sum of its deltas by one residual, so the mean error of the codec goes to zero (with
``decay`` 1; SparseLoCo, arXiv 2508.15706, uses 0.95 and does without outer momentum).

A snapshot may be merged or not, and the learner hears of it later. So a fragment's residual is a pair:
``settled``, which belongs to what was merged so far, and ``pending``, which will hold if the last snapshot
is merged. :func:`resolved` takes the new one if the round's record lists the snapshot, and the old one
otherwise: a delta that was not merged was not sent. :func:`forgotten` starts from zero, which is due

* on a join and on a rollback, where the residual is of a model that is no more;
* on a version this node never held, whose base the residual was not taken against;
* when a snapshot was refused as ``nonfinite`` or ``outlier``: the residual is of the same kind;
* when the codec changes, whose error it is (:func:`for_codec` sees to that).

States are values and the functions pure; residual arrays are made once and never written again.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors.codec_float import round_to_bf16, widen_bf16
from gradientmail_core.tensors.kernels import for_blocks, scratch
from gradientmail_core.tensors.model import Flat

ResidualDtype: TypeAlias = Literal["F32", "BF16"]
Decode: TypeAlias = Callable[[int, int, Flat], None]
"""``decode(start, stop, out)`` writes the decoded elements of a block into ``out``."""

FORGETTING_REASONS = frozenset({"nonfinite", "outlier"})
"""Refusals after which a residual starts from zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """Values left out of a fragment: float32, the bit patterns of bfloat16 (uint16), or None for zeros."""

    values: NDArray[np.float32] | NDArray[np.uint16] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """The residual that holds once the snapshot with this digest is merged."""

    snapshot: str
    residual: Residual


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """Error feedback of one fragment under the codec of that name."""

    codec: str
    settled: Residual = Residual()
    pending: Pending | None = None


def for_codec(feedback: Feedback, codec: str) -> Feedback:
    """The state to encode with ``codec``: unchanged, or from zero if it was another codec's."""
    return feedback if feedback.codec == codec else Feedback(codec)


def published(feedback: Feedback, snapshot: str, residual: Residual) -> Feedback:
    """After a snapshot went out; an unresolved one before it counts as not merged."""
    return replace(feedback, pending=Pending(snapshot, residual))


def resolved(feedback: Feedback, merged: Container[str]) -> Feedback:
    """After the record of the snapshot's round, or of a later one; ``merged`` holds its participants' digests."""
    if feedback.pending is None:
        return feedback
    settled = feedback.pending.residual if feedback.pending.snapshot in merged else feedback.settled
    return replace(feedback, settled=settled, pending=None)


def forgotten(feedback: Feedback) -> Feedback:
    """From zero, with nothing pending."""
    return Feedback(feedback.codec)


def compensated(values: Flat, residual: Residual, out: Flat, decay: float = 1.0) -> None:
    """``out = values + decay·residual`` (fp32); ``out`` may be ``values``."""
    factor = np.float32(decay)

    def block(start: int, stop: int) -> None:
        carried = scratch("carried", stop - start, np.float32)
        _read(residual, start, stop, carried)
        np.multiply(carried, factor, out=carried)
        np.add(values[start:stop], carried, out=out[start:stop])

    for_blocks(values.size, block)


def residual_after(values: Flat, decode: Decode, dtype: ResidualDtype = "F32") -> Residual:
    """``values − decoded``, block by block, kept as ``dtype``; ``values`` are the compensated ones."""
    exact = np.empty(values.size if dtype == "F32" else 0, np.float32)
    patterns = np.empty(values.size if dtype == "BF16" else 0, np.uint16)

    def block(start: int, stop: int) -> None:
        left = exact[start:stop] if dtype == "F32" else scratch("left out", stop - start, np.float32)
        decode(start, stop, left)
        np.subtract(values[start:stop], left, out=left)
        if dtype == "BF16":
            round_to_bf16(left, patterns[start:stop])

    for_blocks(values.size, block)
    return Residual(exact if dtype == "F32" else patterns)


def _read(residual: Residual, start: int, stop: int, out: Flat) -> None:
    match residual.values:
        case None:
            out.fill(0)
        case patterns if patterns.dtype == np.uint16:
            widen_bf16(patterns[start:stop].view(np.uint16), out)
        case values:
            np.copyto(out, values[start:stop])
