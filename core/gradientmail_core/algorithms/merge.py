"""Merges: from a round's deltas to the one delta the outer optimizer takes.

Linear merges (:class:`WeightedMean`, :class:`Rda`) and order statistics (:class:`TrimmedMean`,
:class:`Median`) share one promise: the same contributions in any order of arrival give the same bytes on
any CPU, in two passes over compact contributions and memory for one decoded fragment, the result. How is
told in :mod:`gradientmail_core.algorithms.reduction`.

Every merge has ``clip``: with a number, a contribution whose l2 norm over the fragment is more than
``clip`` times the round's median norm is first scaled down to that (SparseLoCo's deployed guard). A norm
below ``NORM_MIN`` counts as zero.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

import numpy as np

from gradientmail_core.algorithms.reduction import (
    NORM_MIN,
    Agreement,
    Contribution,
    Merged,
    Round,
    Table,
    added,
    cosine_in_sum,
    measured,
    norm_of,
    piece_squares,
    replace_pieces,
    scale_pieces,
    sorted_mean,
    weighted_sum,
)
from gradientmail_core.algorithms.settings import Named, Settings, checked, named_from
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import ROLES, FragmentLayout, Role

__all__ = [
    "Contribution",
    "Median",
    "Merge",
    "Merged",
    "Rda",
    "TrimmedMean",
    "WeightedMean",
    "merge_from",
    "merge_settings",
    "norm_of",
    "piece_squares",
]

_ALWAYS_DIRECT = ("buffer",)


class Merge(Protocol):
    """A deterministic function of a round's contributions."""

    def __call__(
        self, contributions: Sequence[Contribution], layout: FragmentLayout, out: Flat | None = None
    ) -> Merged:
        """Merge one or more contributions of different nodes, all finite, into one delta.

        Weights are relative; they are normalised here. The delta is written to ``out`` if given (flat fp32 of the
        layout's size, of no contribution), else to a new array. Raises :class:`ValueError` for no contributions,
        two of one node, or a weight that is not greater than zero and finite.
        """
        ...

    def settings(self) -> Settings:
        """Plain JSON, read back by :func:`merge_from`."""
        ...


@dataclass(frozen=True, slots=True)
class WeightedMean(Named):
    """The mean by weight, ``sum w_m x_m / sum w_m`` (federated averaging)."""

    clip: float | None = None

    def __post_init__(self) -> None:
        _check_clip(self.clip)

    def __call__(
        self, contributions: Sequence[Contribution], layout: FragmentLayout, out: Flat | None = None
    ) -> Merged:
        round_ = measured(contributions, layout)
        agreement = Agreement(round_)
        delta, _ = weighted_sum(round_, _mean_coefficients(round_, self.clip), out, agreement)
        return Merged(delta, agreement.cosine(), round_.norms_in_order_of(contributions))


@dataclass(frozen=True, slots=True)
class Rda(Named):
    """Radial-directional averaging (Decoupled DiLoCo, arXiv 2604.21428), piece by piece.

    ``(sum w_m |x_m| / sum w_m) * phi(sum w_m phi(x_m))`` with ``phi(x) = x/|x|`` and ``phi(0) = 0``: the mean
    direction at the mean norm. Deltas of different nodes are nearly orthogonal, so their plain mean shrinks
    with the number of nodes; this one keeps its norm, and the outer learning rate need not follow.

    Pieces whose role is in ``direct_roles`` take the plain weighted mean, because the deltas of embeddings,
    heads and 1-D tensors are not near-orthogonal; buffers always do. Where directions cancel, that is
    ``|sum w_m phi(x_m)|`` is at most ``floor`` with weights summing to 1, there is none to follow:
    ``cancel="mean"`` takes the plain mean there, ``"zero"`` leaves the piece where it is. The floor is above the
    rounding of fp32, so noise is never blown up to full norm. A lone contribution is returned as it is.

    The cosine comes from the length of the mean direction, which costs nothing: pairs count by their weights, and
    pieces by their share of the norms (:func:`~gradientmail_core.algorithms.reduction.cosine_in_sum`).
    """

    direct_roles: tuple[Role, ...] = ("embedding", "head", "vector")
    cancel: Literal["mean", "zero"] = "mean"
    floor: float = 1e-6
    clip: float | None = None

    def __post_init__(self) -> None:
        _check_clip(self.clip)
        checked("floor", self.floor, 0.0, 1.0)
        if self.cancel not in ("mean", "zero") or not all(role in ROLES for role in self.direct_roles):
            raise ConfigurationError(
                f"Rda has cancel={self.cancel!r} and direct_roles={self.direct_roles!r}.",
                f"Use 'mean' or 'zero', and roles of {', '.join(ROLES)}.",
            )

    def __call__(
        self, contributions: Sequence[Contribution], layout: FragmentLayout, out: Flat | None = None
    ) -> Merged:
        round_ = measured(contributions, layout)
        mean = _mean_coefficients(round_, self.clip)
        roles = (*self.direct_roles, *_ALWAYS_DIRECT)
        direct = np.array([len(contributions) == 1 or piece.role in roles for piece in layout.pieces])
        lengths = np.sqrt(round_.squares)
        coefficients = np.where(direct, mean, _directions(round_, lengths))
        delta, squares = weighted_sum(round_, coefficients, out)
        cancelled = ~direct & (squares <= self.floor**2)
        scales = np.ones(len(layout.pieces))
        np.divide(added(mean * lengths), np.sqrt(squares), out=scales, where=~direct & ~cancelled)
        scales[cancelled] = 0.0
        scale_pieces(delta, round_, scales.tolist())
        if self.cancel == "mean" and cancelled.any():
            replace_pieces(delta, round_, mean, frozenset(np.flatnonzero(cancelled).tolist()))
        return Merged(delta, cosine_in_sum(round_, coefficients, squares), round_.norms_in_order_of(contributions))


@dataclass(frozen=True, slots=True)
class TrimmedMean(Named):
    """Coordinate by coordinate, the mean without the lowest and highest ``share`` of the values.

    ``floor(share * K)`` of ``K`` values are dropped at each end (Yin et al., arXiv 1803.01498), so that many
    nodes may send anything. Weights are claims of the nodes they would favour and are left out on purpose.
    """

    share: float = 0.25
    clip: float | None = None

    def __post_init__(self) -> None:
        _check_clip(self.clip)
        checked("share", self.share, 0.0, math.nextafter(0.5, 0.0))

    def __call__(
        self, contributions: Sequence[Contribution], layout: FragmentLayout, out: Flat | None = None
    ) -> Merged:
        return _order_statistic(contributions, layout, self.clip, int(self.share * len(contributions)), out)


@dataclass(frozen=True, slots=True)
class Median(Named):
    """Coordinate by coordinate, the median; of an even number the mean of the middle two. Weights are left out."""

    clip: float | None = None

    def __post_init__(self) -> None:
        _check_clip(self.clip)

    def __call__(
        self, contributions: Sequence[Contribution], layout: FragmentLayout, out: Flat | None = None
    ) -> Merged:
        return _order_statistic(contributions, layout, self.clip, (len(contributions) - 1) // 2, out)


_KNOWN: tuple[type[Merge], ...] = (WeightedMean, Rda, TrimmedMean, Median)


def merge_settings(merge: Merge) -> Settings:
    """The merge as plain JSON, for the manifest."""
    return merge.settings()


def merge_from(settings: Mapping[str, object]) -> Merge:
    """The merge that ``settings`` describes; :class:`ConfigurationError` if there is none such."""
    return named_from(settings, _KNOWN, "merge")


def _check_clip(clip: float | None) -> None:
    if clip is not None:
        checked("clip", clip, 1.0)


def _clip_factors(round_: Round, clip: float | None) -> tuple[float, ...]:
    """What each contribution is multiplied by: 1, or ``clip * median / norm`` where that is less."""
    if clip is None:
        return (1.0,) * len(round_.norms)
    limit = clip * median(round_.norms)
    return tuple(limit / norm if norm > limit else 1.0 for norm in round_.norms)


def _mean_coefficients(round_: Round, clip: float | None) -> Table:
    """Each contribution's share in the weighted mean, clipping included, for every piece."""
    shares = [weight * factor for weight, factor in zip(round_.weights, _clip_factors(round_, clip), strict=True)]
    return np.repeat(np.array(shares)[:, np.newaxis], len(round_.layout.pieces), axis=1)


def _directions(round_: Round, lengths: Table) -> Table:
    """``w_m / |x_m|`` for every piece, 0 where the norm is."""
    directions = np.zeros_like(lengths)
    np.divide(np.array(round_.weights)[:, np.newaxis], lengths, out=directions, where=lengths >= NORM_MIN)
    return directions


def _order_statistic(
    contributions: Sequence[Contribution], layout: FragmentLayout, clip: float | None, trim: int, out: Flat | None
) -> Merged:
    round_ = measured(contributions, layout)
    delta, cosine = sorted_mean(round_, _clip_factors(round_, clip), trim, out)
    return Merged(delta, cosine, round_.norms_in_order_of(contributions))
