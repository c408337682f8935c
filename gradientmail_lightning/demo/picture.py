"""The demo's picture: held-out loss against steps and against wall time, with the join and the kill on their curve.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; lines are named where they end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradientmail_lightning.demo.results import Mark, Outcome, Point, Results, mean_curve

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
WARMUP_SHARE = 0.15
"""Part of the first losses left out of view, which are so much higher that they would flatten the rest."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of the picture: a mean, and the runs it is the mean of."""

    name: str
    colour: str
    points: tuple[Point, ...]
    runs: tuple[Outcome, ...]
    style: str = "-"


def draw(results: Results, nodes: int, path: Path) -> None:
    """Write the picture to ``path``, a PNG of 1800 by 840 pixels."""
    lines = [
        Line("one node alone", GREY, mean_curve(results.alone), results.alone),
        Line(f"{nodes} nodes merged", BLUE, mean_curve(results.merged), results.merged),
        Line("merged, with a late join and a kill", ORANGE, results.churn.curve, (results.churn,), "--"),
    ]
    figure = Figure(figsize=(9.0, 4.2), dpi=200, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(left, lines, results.churn, lambda at: at.step, "optimizer steps of each node")
    _panel(right, lines, results.churn, lambda at: at.seconds, "seconds since the first step")
    left.set_ylabel("held-out loss (nats per byte)")
    left.set_ylim(
        *_view(lines, [loss_at(results.churn.curve, mark, lambda at: at.step) for mark in results.churn.marks])
    )
    seeds = len(results.alone)
    figure.suptitle("Held-out loss" + (f", mean of {seeds} seeds (thin: each seed)" if seeds > 1 else ""), fontsize=11)
    handles, names = left.get_legend_handles_labels()
    right.legend(handles, names, frameon=False, loc="upper right", fontsize=9)
    figure.savefig(path)


def _panel(axes: Axes, lines: Sequence[Line], churn: Outcome, x: Callable[[Point | Mark], float], label: str) -> None:
    for line in lines:
        if len(line.runs) > 1:
            for run in line.runs:
                axes.plot([x(p) for p in run.curve], [p.loss for p in run.curve], color=line.colour, lw=0.6, alpha=0.35)
        axes.plot(
            [x(p) for p in line.points],
            [p.loss for p in line.points],
            line.style,
            color=line.colour,
            lw=2.0,
            label=line.name,
        )
    for mark in churn.marks:
        _mark(axes, mark, x, churn.curve)
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.grid(color="#dddddd", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _mark(axes: Axes, mark: Mark, x: Callable[[Point | Mark], float], curve: Sequence[Point]) -> None:
    loss = loss_at(curve, mark, x)
    symbol, text = {"join": ("^", f"{mark.node} joins"), "kill": ("X", f"{mark.node} killed")}[mark.what]
    axes.plot([x(mark)], [loss], symbol, color=ORANGE, markeredgecolor="black", markersize=9, zorder=5)
    axes.annotate(text, (x(mark), loss), (9, 7), textcoords="offset points", fontsize=9, color="black", zorder=6)


def loss_at(curve: Sequence[Point], mark: Mark, x: Callable[[Point | Mark], float]) -> float:
    """The curve's loss at a mark, on the straight line between its neighbours; beyond the ends, the nearest point's."""
    return float(np.interp(x(mark), [x(point) for point in curve], [point.loss for point in curve]))


def _view(lines: Sequence[Line], marked: Sequence[float]) -> tuple[float, float]:
    losses = [point.loss for line in lines for run in line.runs for point in run.curve]
    last = max(run.curve[-1].loss for line in lines for run in line.runs)
    low, high = min(losses), max(losses)
    margin = 0.04 * (high - low)
    return low - margin, max(high - WARMUP_SHARE * (high - last), *marked) + 2 * margin
