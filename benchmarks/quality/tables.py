"""The tables, recomputed from the committed logs and nothing else.

Losses are held-out nats per byte, mean over the seeds; behind ``±`` the standard deviation over seeds of the
*difference to the reference of the same seed* (F32, or one node alone at equal steps), because seeds share
text, weights and shuffles. ``within noise`` means at most two standard errors of that paired difference to
the cell's best, or 0.2 % of its loss.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean, stdev
from typing import Any

from benchmarks.quality.plans import ALONE, INTERVALS, NODES, OUTERS, READ_AT

Row = Mapping[str, Any]
Losses = Mapping[int, float]
"""A loss for each seed."""

NOISE_FLOOR = 0.002


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired comparison over the seeds that both sides have: mean, standard deviation, seeds."""

    mean: float
    spread: float
    seeds: int

    @property
    def standard_error(self) -> float:
        """Of the mean; 0 with one seed."""
        return self.spread / math.sqrt(self.seeds)


def difference(ours: Losses, reference: Losses) -> Difference:
    """``ours - reference``, seed by seed."""
    pairs = [ours[seed] - reference[seed] for seed in sorted(ours.keys() & reference.keys())]
    return Difference(mean(pairs), stdev(pairs) if len(pairs) > 1 else 0.0, len(pairs))


def codec_table(rows: Iterable[Row]) -> str:
    """One line for each codec and kind of error feedback: bits, final loss, and how far it is from F32."""
    found: dict[tuple[str, float | None], dict[int, float]] = defaultdict(dict)
    bits: dict[tuple[str, float | None], float] = {}
    for row in rows:
        trial = row["trial"]
        key = (trial["variant"], trial["feedback"])
        found[key][trial["seed"]] = row["losses"][str(trial["steps"])]
        bits[key] = row["bits_per_parameter"]
    reference = found[("F32", None)]
    lines = [
        "| delta codec | error feedback | bits | held-out loss | against F32 | seeds |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for (variant, feedback), losses in found.items():
        gap = difference(losses, reference)
        share = 100 / mean(reference.values())
        kind = "no" if feedback is None else f"decay {feedback:g}"
        lines.append(
            f"| {variant} | {kind} | {bits[variant, feedback]:.3g} | {mean(losses.values()):.4f} "
            f"| {share * gap.mean:+.2f} % ± {share * gap.spread:.2f} | {len(losses)} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Cell:
    """One situation of the outer study: losses by variant and seed, and those of one node alone, of the same seeds."""

    interval: int
    nodes: int
    steps: int
    variants: Mapping[str, Losses]
    alone: Losses
    alone_equal_tokens: Losses

    def best(self) -> str:
        """The variant of the lowest mean loss."""
        return min(self.variants, key=lambda variant: mean(self.variants[variant].values()))

    def excess(self, variant: str) -> float:
        """How far ``variant`` ends above the best, as a share of the best's mean loss."""
        best = self.variants[self.best()]
        return difference(self.variants[variant], best).mean / mean(best.values())

    def within_noise(self, variant: str) -> bool:
        """Whether ``variant`` cannot be told from the best."""
        best = self.variants[self.best()]
        gap = difference(self.variants[variant], best)
        return gap.mean <= max(2 * gap.standard_error, NOISE_FLOOR * mean(best.values()))

    def loses(self, variant: str) -> bool:
        """Whether ``variant`` ends above one node alone at equal steps, in the mean over the seeds."""
        return difference(self.variants[variant], self.alone).mean > 0


def cells(rows: Sequence[Row]) -> Iterator[Cell]:
    """The situations for which there are rows, of the seeds that every variant there and one node alone have."""
    alone: dict[int, Mapping[str, float]] = {}
    found: dict[tuple[int, int], dict[str, dict[int, Mapping[str, float]]]] = {}
    for row in rows:
        trial = row["trial"]
        if trial["variant"] == ALONE:
            alone[trial["seed"]] = row["losses"]
        else:
            place = found.setdefault((trial["sync_every"], trial["nodes"]), {})
            place.setdefault(trial["variant"], {})[trial["seed"]] = row["losses"]
    for interval, nodes, steps in product(INTERVALS, NODES, READ_AT):
        variants = found.get((interval, nodes), {})
        seeds = sorted(set(alone).intersection(*variants.values())) if variants else []
        if seeds:
            yield Cell(
                interval, nodes, steps,
                {name: _read(variants[name], seeds, steps) for name in OUTERS if name in variants},
                _read(alone, seeds, steps), _read(alone, seeds, steps * nodes),
            )  # fmt: skip


def _read(losses: Mapping[int, Mapping[str, float]], seeds: Iterable[int], step: int) -> Losses:
    return {seed: losses[seed][str(step)] for seed in seeds}


def outer_table(rows: Sequence[Row]) -> str:
    """One line for each situation, the best variant in bold; then how each does over all of them."""
    found = list(cells(rows))
    names = [name for name in OUTERS if any(name in cell.variants for cell in found)]
    lines = [
        "| H | nodes | steps | seeds | alone | alone, equal tokens | " + " | ".join(names) + " |",
        "|--:" * (6 + len(names)) + "|",
        *(_outer_line(cell, names) for cell in found),
        "",
        f"| of {len(found)} situations | " + " | ".join(names) + " |",
        "|---" + "|--:" * len(names) + "|",
    ]
    for what, figure in OVER_ALL.items():
        shown = [figure([cell for cell in found if name in cell.variants], name) for name in names]
        lines.append(f"| {what} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


OVER_ALL: Mapping[str, Callable[[Sequence[Cell], str], str]] = {
    "best or within noise": lambda found, name: str(sum(cell.within_noise(name) for cell in found)),
    "above one node alone": lambda found, name: str(sum(cell.loses(name) for cell in found)),
    "above the best, mean": lambda found, name: f"{mean(cell.excess(name) for cell in found):.1%}",
    "above the best, at most": lambda found, name: f"{max(cell.excess(name) for cell in found):.1%}",
}


def _outer_line(cell: Cell, names: Sequence[str]) -> str:
    shown = [_outer_entry(cell, name) if name in cell.variants else "" for name in names]
    alone, equal_tokens = mean(cell.alone.values()), mean(cell.alone_equal_tokens.values())
    numbers = [cell.interval, cell.nodes, cell.steps, len(cell.alone)]
    return "| " + " | ".join([*map(str, numbers), f"{alone:.3f}", f"{equal_tokens:.3f}", *shown]) + " |"


def _outer_entry(cell: Cell, name: str) -> str:
    losses = cell.variants[name]
    gap = difference(losses, cell.alone)
    text = f"{mean(losses.values()):.3f}" + (f" ± {gap.spread:.3f}" if gap.seeds > 1 else "")
    return f"**{text}**" if name == cell.best() else text
