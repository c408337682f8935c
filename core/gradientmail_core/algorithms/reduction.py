"""Passes over a round's contributions: what every merge is made of.

Contributions stay compact. A pass walks the fragment in blocks of 65,536 elements on threads and decodes
one contribution's block at a time, so besides the output a merge holds ``threads * BLOCK`` elements of
scratch, times the number of contributions only where it must sort them.

The result depends on the contributions and nothing else. They are taken in node-id order whatever order
they came in; every number is made of elementwise ``+ - * /``, ``min``, ``max`` and square roots, and of
fp64 sums over the intersection of a block and a piece, added in order. A thread computes whole blocks
and writes them to their own place, so thread count and timing move nothing; no operation used rounds
differently on another CPU.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors import kernels
from gradientmail_core.tensors.kernels import BLOCK
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout

Table: TypeAlias = NDArray[np.float64]
"""fp64 of shape (contributions, pieces)."""

Totals: TypeAlias = NDArray[np.float64]
"""fp64 of shape (pieces,)."""

Blocks: TypeAlias = "tuple[tuple[Segment, ...], ...]"
"""The segments of each block of a fragment."""

Decode: TypeAlias = Callable[[int, int, Flat], None]

NORM_MIN = 1e-30
"""A norm below this is taken as zero: its reciprocal would leave the range of fp32."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One node's delta in its compact form.

    ``decode(start, stop, out)`` writes elements ``start`` to ``stop`` of the flat fragment into ``out``
    (fp32, ``stop - start`` elements; ``start`` is a multiple of ``BLOCK``); it is called from several
    threads at once. ``weight`` is relative to the other contributions' and greater than zero. ``squares`` is
    what :func:`piece_squares` said of it, where a closer has asked before to judge its norm; a merge then
    saves the pass, and its result is the same.
    """

    node: str
    weight: float
    decode: Decode
    squares: Totals | None = None


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge's result.

    ``delta`` is flat fp32; ``cosine`` the mean cosine over all pairs of contributions (None with fewer
    than two of non-zero norm); ``norms`` the contributions' l2 norms before clipping, in input order.
    """

    delta: Flat
    cosine: float | None
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """The intersection of one piece and one block; ``start`` and ``stop`` count from the block's start."""

    index: int
    piece: int
    start: int
    stop: int

    @property
    def span(self) -> slice:
        """The segment within its block."""
        return slice(self.start, self.stop)


def segments(layout: FragmentLayout) -> Blocks:
    """The segments of each block, in order; numbered through the whole fragment."""
    blocks: list[list[Segment]] = [[] for _ in range(-(-layout.size // BLOCK))]
    count = 0
    for number, piece in enumerate(layout.pieces):
        end = piece.offset + piece.elements
        for block in range(piece.offset // BLOCK, -(-end // BLOCK) if piece.elements else 0):
            first = block * BLOCK
            blocks[block].append(Segment(count, number, max(piece.offset - first, 0), min(end - first, BLOCK)))
            count += 1
    return tuple(tuple(held) for held in blocks)


@dataclass(frozen=True, slots=True)
class Round:
    """Contributions in node-id order, measured once.

    ``weights`` sum to 1; ``squares`` holds each contribution's sum of squares per piece; ``norms`` its
    l2 norm over the fragment.
    """

    contributions: tuple[Contribution, ...]
    layout: FragmentLayout
    blocks: Blocks
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
    given = [piece_squares(one.decode, layout) if one.squares is None else one.squares for one in held]
    norms = tuple(norm_of(squares) for squares in given)
    return Round(held, layout, segments(layout), weights, np.stack(given), norms)


def piece_squares(decode: Decode, layout: FragmentLayout) -> Totals:
    """The sum of squares of each piece of a contribution (fp64): one pass over it."""
    blocks = segments(layout)
    partial = np.zeros(_segment_count(blocks))

    def block(start: int, stop: int) -> None:
        values = _scratch("merge.values", stop - start)
        decode(start, stop, values)
        with np.errstate(invalid="ignore"):  # whoever asks refuses what is not finite
            for segment in blocks[start // BLOCK]:
                partial[segment.index] = _square_sum(values[segment.span])

    kernels.for_blocks(layout.size, block)
    return _by_piece(partial, blocks, len(layout.pieces))


def norm_of(squares: Totals) -> float:
    """The l2 norm over the fragment, of the pieces' sums of squares."""
    total = 0.0
    for square in squares.tolist():
        total += square
    return math.sqrt(total)


def weighted_sum(round_: Round, coefficients: Table) -> tuple[Flat, Totals, float | None]:
    """The second pass of linear merges: ``sum_m coefficients[m, piece] * x_m`` for every piece.

    Returns the sum (flat fp32), its sum of squares per piece, and the mean pairwise cosine.
    """
    delta = np.empty(round_.layout.size, np.float32)
    factors = coefficients.astype(np.float32)
    partial = np.zeros(_segment_count(round_.blocks))

    def combine(start: int, stop: int, unit: Flat | None) -> None:
        held, total = round_.blocks[start // BLOCK], delta[start:stop]
        _accumulate(round_, factors, held, start, total, unit)
        for segment in held:
            partial[segment.index] = _square_sum(total[segment.span])

    cosine = _with_cosine(round_, combine)
    return delta, _by_piece(partial, round_.blocks, len(round_.layout.pieces)), cosine


def sorted_mean(round_: Round, factors: Sequence[float], trim: int) -> tuple[Flat, float | None]:
    """The second pass of order statistics, coordinate by coordinate.

    Contribution ``m`` is multiplied by ``factors[m]``, the ``trim`` lowest and highest values are dropped.
    Returns the plain mean of the rest (flat fp32) and the mean pairwise cosine. Scratch is one block per
    contribution and thread.
    """
    delta = np.empty(round_.layout.size, np.float32)
    count = len(round_.contributions)
    pairs = tuple(comparators(count))

    def combine(start: int, stop: int, unit: Flat | None) -> None:
        *rows, term = (_scratch(f"merge.row{row}", stop - start) for row in range(count + 1))
        for row, contribution, norm, factor in zip(rows, round_.contributions, round_.norms, factors, strict=True):
            contribution.decode(start, stop, row)
            if unit is not None:
                np.multiply(row, _reciprocal(norm), out=term)
                np.add(unit, term, out=unit)
            np.multiply(row, np.float32(factor), out=row)
            np.add(row, np.float32(0.0), out=row)  # -0.0 becomes 0.0: min and max may return either of the two
        _sort(rows, term, pairs)
        _mean_of(rows[trim : count - trim], delta[start:stop])

    return delta, _with_cosine(round_, combine)


def scale_pieces(delta: Flat, round_: Round, scales: Sequence[float]) -> None:
    """Multiply each piece of ``delta`` by its scale, in place; 1 leaves a piece and 0 clears it."""
    factors = [np.float32(scale) for scale in scales]

    def block(start: int, stop: int) -> None:
        values = delta[start:stop]
        for segment in round_.blocks[start // BLOCK]:
            if factors[segment.piece] != 1.0:
                part = values[segment.span]
                np.multiply(part, factors[segment.piece], out=part)

    kernels.for_blocks(delta.size, block)


def replace_pieces(delta: Flat, round_: Round, coefficients: Table, pieces: frozenset[int]) -> None:
    """Compute ``sum_m coefficients[m, piece] * x_m`` anew for some pieces and write it into ``delta``."""
    factors = coefficients.astype(np.float32)

    def block(start: int, stop: int) -> None:
        chosen = tuple(segment for segment in round_.blocks[start // BLOCK] if segment.piece in pieces)
        if chosen:
            _accumulate(round_, factors, chosen, start, delta[start:stop], None)

    kernels.for_blocks(delta.size, block)


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


def _segment_count(blocks: Blocks) -> int:
    return sum(len(held) for held in blocks)


def _by_piece(partial: NDArray[np.float64], blocks: Blocks, pieces: int) -> Totals:
    """Add the segments' sums piece by piece, in block order."""
    totals = np.zeros(pieces)
    for held in blocks:
        for segment in held:
            totals[segment.piece] += partial[segment.index]
    return totals


def _accumulate(
    round_: Round, factors: NDArray[np.float32], held: Sequence[Segment], start: int, out: Flat, unit: Flat | None
) -> None:
    """Write the weighted sum of one block's segments to ``out``; add every contribution's unit vector to ``unit``."""
    values, term = _scratch("merge.values", out.size), _scratch("merge.term", out.size)
    for row, (contribution, norm) in enumerate(zip(round_.contributions, round_.norms, strict=True)):
        contribution.decode(start, start + out.size, values)
        for segment in held:
            part = segment.span
            scaled = out[part] if row == 0 else term[part]
            np.multiply(values[part], factors[row, segment.piece], out=scaled)
            if row > 0:
                np.add(out[part], scaled, out=out[part])
        if unit is not None:
            np.multiply(values, _reciprocal(norm), out=values)
            np.add(unit, values, out=unit)


def _square_sum(values: Flat) -> float:
    """The sum of squares of at most a block: exact squares in fp64, one ``add.reduce``.

    The same number as ``kernels.sum_of_squares``, without what that does to share larger arrays among threads.
    """
    squares = kernels.scratch("merge.squares", values.size, np.float64)
    np.copyto(squares, values)
    np.multiply(squares, squares, out=squares)
    return float(np.add.reduce(squares))


def _scratch(name: str, count: int) -> Flat:
    return cast(Flat, kernels.scratch(name, count, np.float32))


def _reciprocal(norm: float) -> np.float32:
    return np.float32(1.0 / norm if norm >= NORM_MIN else 0.0)


def _with_cosine(round_: Round, combine: Callable[[int, int, Flat | None], None]) -> float | None:
    """Run ``combine(start, stop, unit)`` over all blocks; the mean pairwise cosine from what it adds to ``unit``.

    With unit vectors ``u_m``, ``|sum u_m|^2 = n + sum of the cosines over ordered pairs``, so ``n`` vectors
    need one sum instead of ``n*(n-1)/2`` products.
    """
    count = sum(norm >= NORM_MIN for norm in round_.norms)
    if count < 2:
        kernels.for_blocks(round_.layout.size, lambda start, stop: combine(start, stop, None))
        return None

    def block(start: int, stop: int) -> float:
        unit = _scratch("merge.unit", stop - start)
        unit.fill(0.0)
        combine(start, stop, unit)
        return _square_sum(unit)

    agreement = kernels.sum_blocks(round_.layout.size, block)
    cosine = (agreement - count) / (count * (count - 1))
    return max(-1.0, min(1.0, cosine))


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
