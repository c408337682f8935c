"""Passes over a round's contributions: what every merge is made of.

Contributions stay compact. A pass walks the fragment in spans of 262,144 elements on threads and reads one
contribution's span at a time, so besides the output a merge holds a few ``threads * SPAN`` elements of
scratch. Where it must sort contributions it walks blocks of 65,536, and holds one of each.

The result depends on the contributions and nothing else. They are taken in node-id order whatever order
they came in; every number is made of elementwise ``+ - * /``, ``min``, ``max`` and square roots, and of
sums over the intersection of a span and a piece (see :data:`LANES`), added in order in fp64. A thread computes
whole spans or blocks and writes them to their own place, so thread count and timing move nothing; no operation used
rounds differently on another CPU.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors import kernels
from gradientmail_core.tensors.kernels import BLOCK, SPAN
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout

Table: TypeAlias = NDArray[np.float64]
"""fp64 of shape (contributions, pieces)."""

Totals: TypeAlias = NDArray[np.float64]
"""fp64 of shape (pieces,)."""

Read: TypeAlias = Callable[[int, int, Flat], Flat]

NORM_MIN = 1e-30
"""A norm below this is taken as zero: its reciprocal would leave the range of fp32."""

LANES = 2048
"""Columns in which squares are added: two of them and their sums stay in a core's nearest cache."""

_PAIRS_LEAST = 1e-5
"""Where all pairs together weigh less than this beside the contributions alone, rounding hides their cosine."""

_SQUARES_LEAST = 2.0**-100
"""Below this, squares that fp32 rounds to its smallest values would weigh in the sum of a span."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One node's delta in its compact form.

    ``read(start, stop, out)`` gives elements ``start`` to ``stop`` of the flat fragment (fp32; ``start`` is a
    multiple of ``BLOCK``), as :meth:`~gradientmail_core.tensors.encoded.Encoded.read` does. ``weight`` is relative
    to the other contributions' and greater than zero. ``squares`` is what :func:`piece_squares` said of it, where a
    closer has asked before to judge its norm; a merge then saves the pass, and its result is the same.
    """

    node: str
    weight: float
    read: Read
    squares: Totals | None = None


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge's result.

    ``delta`` is flat fp32; ``cosine`` the mean cosine over all pairs of contributions (None with fewer
    than two of non-zero norm; how :class:`~gradientmail_core.algorithms.merge.Rda` comes by it is told in
    :func:`cosine_in_sum`); ``norms`` the contributions' l2 norms before clipping, in input order.
    """

    delta: Flat
    cosine: float | None
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The intersection of one piece and one span: its number in the fragment, and where in its span it lies."""

    index: int
    piece: int
    place: slice


Cut: TypeAlias = tuple[Run, ...]
"""How one span falls to pieces."""


def cuts(layout: FragmentLayout) -> tuple[Cut, ...]:
    """The cut of each span, in order; runs are numbered through the whole fragment."""
    runs: list[list[Run]] = [[] for _ in range(-(-layout.size // SPAN))]
    count = 0
    for number, piece in enumerate(layout.pieces):
        for span, place in _within(piece.offset, piece.elements, SPAN):
            runs[span].append(Run(count, number, place))
            count += 1
    return tuple(map(tuple, runs))


def _within(offset: int, elements: int, unit: int) -> Iterator[tuple[int, slice]]:
    """The units that a piece touches, and where in each."""
    end = offset + elements
    for index in range(offset // unit, -(-end // unit) if elements else 0):
        yield index, slice(max(offset - index * unit, 0), min(end - index * unit, unit))


@dataclass(frozen=True, slots=True)
class Round:
    """Contributions in node-id order, measured once.

    ``weights`` sum to 1; ``squares`` holds each contribution's sum of squares per piece; ``norms`` its
    l2 norm over the fragment.
    """

    contributions: tuple[Contribution, ...]
    layout: FragmentLayout
    cuts: tuple[Cut, ...]
    weights: tuple[float, ...]
    squares: Table
    norms: tuple[float, ...]

    def norms_in_order_of(self, contributions: Sequence[Contribution]) -> tuple[float, ...]:
        """The norms in the order of the caller's sequence."""
        by_node = dict(zip((held.node for held in self.contributions), self.norms, strict=True))
        return tuple(by_node[contribution.node] for contribution in contributions)


def measured(contributions: Sequence[Contribution], layout: FragmentLayout) -> Round:
    """The first pass: sort, normalise the weights, take the norms.

    Raises :class:`ValueError` for no contributions, two of one node, or weights that are not greater
    than zero and finite; the caller has refused such snapshots before.
    """
    held = tuple(sorted(contributions, key=lambda contribution: contribution.node))
    weights = _normalised([contribution.weight for contribution in held])
    if len({contribution.node for contribution in held}) != len(held):
        raise ValueError("two contributions of one node")
    given = [piece_squares(one.read, layout) if one.squares is None else one.squares for one in held]
    norms = tuple(norm_of(squares) for squares in given)
    return Round(held, layout, cuts(layout), weights, np.stack(given), norms)


def piece_squares(read: Read, layout: FragmentLayout) -> Totals:
    """The sum of squares of each piece of a contribution (fp64): one pass over it."""
    cut = cuts(layout)
    partial = np.zeros(_run_count(cut))

    def span(start: int, stop: int) -> None:
        values = read(start, stop, _scratch("merge.values", stop - start))
        _note_squares(values, cut[start // SPAN], partial)

    kernels.for_spans(layout.size, span)
    return _by_piece(partial, cut, len(layout.pieces))


def norm_of(squares: Totals) -> float:
    """The l2 norm over the fragment, of the pieces' sums of squares."""
    total = 0.0
    for square in squares.tolist():
        total += square
    return math.sqrt(total)


def weighted_sum(
    round_: Round, coefficients: Table, out: Flat | None = None, agreement: "Agreement | None" = None
) -> tuple[Flat, Totals]:
    """The second pass of linear merges: ``sum_m coefficients[m, piece] * x_m`` for every piece.

    Returns the sum (flat fp32, in ``out`` if given) and its sum of squares per piece. ``agreement`` takes note of the
    contributions along the way, which doubles the arithmetic.
    """
    delta = _result(round_.layout, out)
    factors = coefficients.astype(np.float32)
    partial = np.zeros(_run_count(round_.cuts))

    def span(start: int, stop: int) -> None:
        cut, total = round_.cuts[start // SPAN], delta[start:stop]
        unit = agreement.unit(stop - start) if agreement is not None else None
        _accumulate(round_, factors, cut, start, total, agreement, unit)
        _note_squares(total, cut, partial)
        if agreement is not None:
            agreement.note(start, unit)

    kernels.for_spans(delta.size, span)
    return delta, _by_piece(partial, round_.cuts, len(round_.layout.pieces))


def cosine_in_sum(round_: Round, coefficients: Table, squares: Totals) -> float | None:
    """The mean pairwise cosine as a weighted sum's ``squares`` tell it, without another look at the contributions.

    In a piece, ``|sum_m c_m x_m|^2 - sum_m c_m^2 |x_m|^2`` adds ``c_m c_n x_m.x_n`` over ordered pairs. Over the
    same sum of ``c_m c_n |x_m| |x_n|`` that is the mean cosine of the piece, in which a pair counts by its
    coefficients and norms. Pieces count by the mean over pairs of ``|x_m| |x_n|`` as a share of the product of the
    norms over the fragment. For two contributions that is their cosine, and for more the mean of their cosines as
    far as pairs count alike. None with fewer than two of non-zero norm.
    """
    norms = np.array(round_.norms)
    count = int(np.count_nonzero(norms >= NORM_MIN))
    if count < 2:
        return None
    lengths = np.sqrt(round_.squares)
    parts = coefficients.astype(np.float32).astype(np.float64) * lengths
    own, pairs = added(parts * parts), _over_pairs(parts)
    shares = np.zeros_like(lengths)
    np.divide(lengths, norms[:, np.newaxis], out=shares, where=norms[:, np.newaxis] >= NORM_MIN)
    counts = _over_pairs(shares) / (count * (count - 1))
    cosines = np.zeros_like(squares)
    np.divide(squares - own, pairs, out=cosines, where=pairs > _PAIRS_LEAST * own)
    total = 0.0
    for cosine, weight in zip(np.clip(cosines, -1.0, 1.0).tolist(), counts.tolist(), strict=True):
        total += cosine * weight
    return max(-1.0, min(1.0, total))


def added(table: Table) -> Totals:
    """The column sums of a table, its rows added from first to last."""
    total = np.zeros(table.shape[1])
    for row in table:
        total += row
    return total


def _over_pairs(table: Table) -> Totals:
    """The sum of products over ordered pairs of rows, column by column."""
    total = added(table)
    return total * total - added(table * table)


def sorted_mean(
    round_: Round, factors: Sequence[float], trim: int, out: Flat | None = None
) -> tuple[Flat, float | None]:
    """The second pass of order statistics, coordinate by coordinate.

    Contribution ``m`` is multiplied by ``factors[m]``, the ``trim`` lowest and highest values are dropped.
    Returns the plain mean of the rest (flat fp32, in ``out`` if given) and the mean pairwise cosine. Scratch is one
    block per contribution and thread.
    """
    delta = _result(round_.layout, out)
    count = len(round_.contributions)
    pairs = tuple(comparators(count))
    agreement = Agreement(round_)

    def block(start: int, stop: int) -> None:
        *rows, term = (_scratch(f"merge.row{row}", stop - start) for row in range(count + 1))
        unit = agreement.unit(stop - start)
        for number, (row, contribution, factor) in enumerate(zip(rows, round_.contributions, factors, strict=True)):
            values = contribution.read(start, stop, row)
            agreement.add(number, values, unit, term)
            np.multiply(values, np.float32(factor), out=row)
            np.add(row, np.float32(0.0), out=row)  # -0.0 becomes 0.0: min and max may return either of the two
        _sort(rows, term, pairs)
        _mean_of(rows[trim : count - trim], delta[start:stop])
        agreement.note(start, unit)

    kernels.for_blocks(delta.size, block)
    return delta, agreement.cosine()


def scale_pieces(delta: Flat, round_: Round, scales: Sequence[float]) -> None:
    """Multiply each piece of ``delta`` by its scale, in place; 1 leaves a piece and 0 clears it."""
    factors = [np.float32(scale) for scale in scales]

    def span(start: int, stop: int) -> None:
        values = delta[start:stop]
        for run in round_.cuts[start // SPAN]:
            if factors[run.piece] != 1.0:
                np.multiply(values[run.place], factors[run.piece], out=values[run.place])

    kernels.for_spans(delta.size, span)


def replace_pieces(delta: Flat, round_: Round, coefficients: Table, pieces: frozenset[int]) -> None:
    """Compute ``sum_m coefficients[m, piece] * x_m`` anew for some pieces and write it into ``delta``."""
    factors = coefficients.astype(np.float32)

    def span(start: int, stop: int) -> None:
        chosen = tuple(run for run in round_.cuts[start // SPAN] if run.piece in pieces)
        if chosen:
            _accumulate(round_, factors, chosen, start, delta[start:stop], None, None)

    kernels.for_spans(delta.size, span)


def comparators(count: int) -> list[tuple[int, int]]:
    """A sorting network for ``count`` values: pairs to put in order, one after the other.

    Batcher's merge exchange (Knuth, The Art of Computer Programming 3, algorithm 5.2.2M), which takes
    any count.
    """
    pairs: list[tuple[int, int]] = []
    top = 1 << max(count - 1, 0).bit_length() >> 1
    width = top
    while width > 0:
        reach, remainder, distance = top, 0, width
        while True:
            pairs += [(low, low + distance) for low in range(count - distance) if low & width == remainder]
            if reach == width:
                break
            distance, reach, remainder = reach - width, reach >> 1, width
        width >>= 1
    return pairs


def _normalised(weights: Sequence[float]) -> tuple[float, ...]:
    if not weights or not all(0.0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights {list(weights)} are not all greater than zero and finite")
    largest = max(weights)
    shares = [weight / largest for weight in weights]
    total = 0.0
    for share in shares:
        total += share
    return tuple(share / total for share in shares)


class Agreement:
    """The mean pairwise cosine of a round, from sums of unit vectors that the second pass makes along its way.

    With unit vectors ``u_m``, ``|sum u_m|^2 = n + sum of the cosines over ordered pairs``, so ``n`` vectors
    need one sum instead of ``n*(n-1)/2`` products. With fewer than two vectors there is none.
    """

    def __init__(self, round_: Round) -> None:
        self._count = sum(norm >= NORM_MIN for norm in round_.norms)
        self._reciprocals = [np.float32(1.0 / norm if norm >= NORM_MIN else 0.0) for norm in round_.norms]
        self._squares = [0.0] * -(-round_.layout.size // BLOCK)

    def unit(self, size: int) -> Flat | None:
        """Where to sum ``size`` elements of the unit vectors; None if there is no cosine."""
        return _scratch("merge.unit", size) if self._count > 1 else None

    def add(self, number: int, values: Flat, unit: Flat | None, term: Flat) -> None:
        """Add the unit vector of the round's contribution ``number``; the first one begins the sum."""
        if unit is None:
            return
        scaled = term if number else unit
        np.multiply(values, self._reciprocals[number], out=scaled)
        if number:
            np.add(unit, term, out=unit)

    def note(self, start: int, unit: Flat | None) -> None:
        """Take the sum at ``start``, a multiple of ``BLOCK``, into account."""
        if unit is not None:
            (self._squares[start // BLOCK],) = _square_sums(unit, [slice(0, unit.size)])

    def cosine(self) -> float | None:
        """The mean over all pairs, once every sum is noted."""
        if self._count < 2:
            return None
        total = 0.0
        for squares in self._squares:
            total += squares
        return max(-1.0, min(1.0, (total - self._count) / (self._count * (self._count - 1))))


def _result(layout: FragmentLayout, out: Flat | None) -> Flat:
    return np.empty(layout.size, np.float32) if out is None else out


def _run_count(cut: Sequence[Cut]) -> int:
    return sum(map(len, cut))


def _by_piece(partial: NDArray[np.float64], cut: Sequence[Cut], pieces: int) -> Totals:
    """Add the runs' sums piece by piece, in their order."""
    totals = np.zeros(pieces)
    for span in cut:
        for run in span:
            totals[run.piece] += partial[run.index]
    return totals


def _accumulate(
    round_: Round,
    factors: NDArray[np.float32],
    runs: Sequence[Run],
    start: int,
    out: Flat,
    agreement: Agreement | None,
    unit: Flat | None,
) -> None:
    """Write the weighted sum of one span's ``runs`` to ``out``; add every contribution's unit vector to ``unit``."""
    scratch, term = _scratch("merge.values", out.size), _scratch("merge.term", out.size)
    for number, contribution in enumerate(round_.contributions):
        values = contribution.read(start, start + out.size, scratch)
        for run in runs:
            total = out[run.place]
            scaled = term[run.place] if number else total
            np.multiply(values[run.place], factors[number, run.piece], out=scaled)
            if number:
                np.add(total, scaled, out=total)
        if agreement is not None:
            agreement.add(number, values, unit, term)


def _note_squares(values: Flat, cut: Cut, partial: NDArray[np.float64]) -> None:
    """Write the sum of squares of each run of a span to the run's number in ``partial``."""
    for run, total in zip(cut, _square_sums(values, [run.place for run in cut]), strict=True):
        partial[run.index] = total


def _square_sums(values: Flat, places: Sequence[slice]) -> list[float]:
    """The sums of squares of parts of at most a span.

    Squares are taken in fp32, half the traffic of fp64, and added down :data:`LANES` columns in fp32, at most
    ``SPAN / LANES`` to a column; the columns' sums are added in fp64. That is within 8e-6 of the exact sum at worst
    and 1e-8 as a rule. Where fp32 has not the range for the squares, or something is not finite, the sum is made in
    fp64 alone.
    """
    squares = _scratch("merge.squares", values.size)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # whoever asks refuses what is not finite
        np.multiply(values, values, out=squares)
        sums = [_lane_sum(squares[place]) for place in places]
        return [
            total if _SQUARES_LEAST <= total < math.inf else _exact_sum(values[place])
            for total, place in zip(sums, places, strict=True)
        ]


def _lane_sum(squares: Flat) -> float:
    """The sum of up to a span's fp32 values, none negative."""
    whole = squares.size // LANES * LANES
    lanes = np.add.reduce(squares[:whole].reshape(-1, LANES), axis=0)
    return float(np.add.reduce(lanes.astype(np.float64)) + np.add.reduce(squares[whole:].astype(np.float64)))


def _exact_sum(values: Flat) -> float:
    """The sum of squares in fp64, where squares of fp32 values are exact."""
    squares = kernels.scratch("merge.exact", values.size, np.float64)
    np.copyto(squares, values)
    return float(np.add.reduce(np.multiply(squares, squares, out=squares)))


def _scratch(name: str, count: int) -> Flat:
    return cast(Flat, kernels.scratch(name, count, np.float32))


def _sort(rows: list[Flat], spare: Flat, pairs: Sequence[tuple[int, int]]) -> None:
    """Sort each coordinate over the rows by a network; the list is reordered, the arrays are reused."""
    for low, high in pairs:
        np.minimum(rows[low], rows[high], out=spare)
        np.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]


def _mean_of(rows: Sequence[Flat], out: Flat) -> None:
    np.copyto(out, rows[0])
    for row in rows[1:]:
        np.add(out, row, out=out)
    np.divide(out, np.float32(len(rows)), out=out)
