"""Streaming DiLoCo's table 4 by this library's model: the bandwidth each method needs to keep computing.

    python -m benchmarks.tables.table4 [--json docs/results/table-four.json]

The paper (arXiv 2501.18512) gives, for three models and five methods, the Gbit/s at which the compute utilization
reaches five targets, read off a grid. Its figures stand below; ours come from
:mod:`gradientmail_core.sim.utilization`. The paper does not print its grid, how many bits a parameter takes, nor how
compute splits: 50 points from 0.1 to 1000 Gbit/s, 16 bits (4 for FP4) and 0.82 of the nominal parameters, and equal
thirds are fitted, the same for all 75 cells.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradientmail_core.sim.utilization import Layered, Merging, bandwidth_for

GRID_GBITS = np.logspace(-1, 3, 50)
TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
COUNTED_SHARE = 0.82
LAYERS_PER_FRAGMENT = 3


@dataclass(frozen=True, slots=True)
class Trained:
    """One of the paper's models: its nominal parameters, layers and seconds per step."""

    name: str
    parameters: float
    layers: int
    step_seconds: float


MODELS = (Trained("1B", 1e9, 24, 0.1), Trained("10B", 10e9, 48, 0.8), Trained("100B", 100e9, 108, 4.9))
METHODS = ("DP", "DiLoCo", "Streaming", "+ overlap", "+ FP4")
PUBLISHED: Mapping[str, tuple[tuple[float, ...], ...]] = {
    "1B": (
        (86.8, 152.6, 184.2, 222.3, 569.0),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0),
        (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    "10B": (
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16.0, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    "100B": (
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3.0, 11.0, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
}


def merging(method: str, layers: int) -> Merging:
    """The schedule of a method; the paper merges every 100 steps, in fragments of three layers."""
    streamed = layers // LAYERS_PER_FRAGMENT
    return {
        "DP": Merging(),
        "DiLoCo": Merging(100),
        "Streaming": Merging(100, streamed),
        "+ overlap": Merging(100, streamed, overlap=1),
        "+ FP4": Merging(100, streamed, overlap=1),
    }[method]


def cells(model: Trained, method: str) -> tuple[float, ...]:
    """Gbit/s for each target; infinity where the grid ends first."""
    bits = (4 if method == "+ FP4" else 16) * COUNTED_SHARE * model.parameters
    layered = Layered(model.layers, model.step_seconds, bits)
    found = bandwidth_for(layered, merging(method, model.layers), TARGETS, GRID_GBITS * 1e9)
    return tuple(float("inf") if at is None else at / 1e9 for at in found)


def grid_steps(ours: float, published: float) -> int:
    """How many points of the grid lie between ours and the nearest that prints as ``published`` with one decimal.

    The paper cuts some of its figures off and rounds others (86.85 stands as 86.8, 2.947 as 3.0), so both count.
    """
    if not np.isfinite(ours):
        return len(GRID_GBITS)
    printed = (published - 0.06 <= GRID_GBITS) & (published + 0.1 > GRID_GBITS)
    return int(np.abs(np.flatnonzero(printed) - np.abs(GRID_GBITS - ours).argmin()).min())


def computed() -> dict[str, Any]:
    """Both tables, and how far they are apart."""
    rows: list[dict[str, object]] = []
    apart: list[int] = []
    for model in MODELS:
        for method, published in zip(METHODS, PUBLISHED[model.name], strict=True):
            ours = cells(model, method)
            steps = [grid_steps(one, other) for one, other in zip(ours, published, strict=True)]
            shown = [round(one, 2) for one in ours]
            rows.append({"model": model.name, "method": method, "published": published, "ours": shown, "apart": steps})
            apart += steps
    return {"targets": TARGETS, "rows": rows, "cells": len(apart), "equal": apart.count(0), "farthest": max(apart)}


def main() -> None:
    """Print the tables side by side, and write them to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures = computed()
    for row in figures["rows"]:
        print(f"{row['model']:>5} {row['method']:<10} published {row['published']} ours {row['ours']}")
    print(f"{figures['equal']} of {figures['cells']} cells equal, the farthest {figures['farthest']} grid step(s) away")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
