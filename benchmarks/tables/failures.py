"""Goodput under failures, and a storm: what the production engine makes of them on virtual time.

    python -m benchmarks.tables.failures goodput --json docs/results/goodput.json
    python -m benchmarks.tables.failures storm --json docs/results/storm.json

*goodput*: eight nodes, each down for 8 s after every 60 s of being up on average (exponential times). No node can
train for more than 1 / (1 + 8/60) = 88 % of its time; Decoupled DiLoCo (arXiv 2604.21428, table 1) reports 88 % for
eight learners. Beside it a lock-step run, where any failure stops all.

*storm*: 32 nodes under 125 faults an hour (crashes, freezes, partitions, hung and slow trainers of 5 to 45 s) for 30
minutes, 20 seeds.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean

from gradientmail_core.sim.fleet import Fleet, Outcome, goodput_fleet, lock_step_goodput, run, storm_fleet

UP_SECONDS, DOWN_SECONDS = 60.0, 8.0
FLEETS: Mapping[str, Callable[[float, int], Fleet]] = {"goodput": goodput_fleet, "storm": storm_fleet}


def sailed(kind: str, minutes: float, seed: int) -> dict[str, float]:
    """One seed's figures."""
    outcome: Outcome = run(FLEETS[kind](minutes, seed))
    figures = {
        "seed": seed,
        "goodput": outcome.goodput,
        "merged_share": outcome.merged_share,
        "rounds": outcome.rounds,
        "due_rounds": outcome.due_rounds,
        "committed_share": outcome.committed_share,
        "participants": outcome.participants,
        "failed": outcome.failed,
    }
    if kind == "goodput":
        figures["lock_step"] = lock_step_goodput(8, 60.0 * minutes, UP_SECONDS, DOWN_SECONDS, seed)
    return figures


def measured(kind: str, minutes: float, seeds: int, processes: int) -> dict[str, object]:
    """All seeds and their means."""
    started = time.monotonic()
    with ProcessPoolExecutor(processes) as pool:
        runs = list(pool.map(partial(sailed, kind, minutes), range(seeds)))
    means = {name: mean(one[name] for one in runs) for name in runs[0] if name != "seed"}
    return {
        "kind": kind,
        "minutes": minutes,
        "seeds": seeds,
        **means,
        "runs": runs,
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    """Run, print the means, and write everything to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(FLEETS))
    parser.add_argument("--minutes", type=float, default=30.0, help="virtual minutes (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures = measured(options.kind, options.minutes, options.seeds, options.processes)
    for name, value in figures.items():
        if isinstance(value, float | int):
            print(f"{name:>16} {value:.4g}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
