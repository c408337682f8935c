"""What compression and outer optimizers cost in loss, on real text, with committed logs.

    python -m benchmarks.quality plan                   trials and node steps still to run, and their time here
    python -m benchmarks.quality run codecs|outer       run what is missing; stop and resume at will
    python -m benchmarks.quality tables                 recompute the tables from the logs

Trials run on one core, a few at a time as one computation. Run as
``OMP_NUM_THREADS=1 GRADIENTMAIL_THREADS=1 nice -n 19 python -m ...`` to stay out of everyone's way. Rows are
appended to ``benchmarks/quality/logs/<study>.jsonl`` when their trials end.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.quality.log import append, missing, path_of, read
from benchmarks.quality.plans import PLANS
from benchmarks.quality.stack import run_together, stacks
from benchmarks.quality.tables import codec_table, outer_table
from benchmarks.quality.trial import Trial

PROBED_STEPS = 100


def plan() -> None:
    """Say what is left, timed by short trials of each study's model."""
    for study, trials in PLANS.items():
        left = missing(trials(), read(path_of(study)))
        steps = sum(trial.node_steps for trial in left)
        each = _seconds_of_a_node_step(left) if left else 0.0
        print(
            f"{study}: {len(left)} trials, {steps} node steps of {1000 * each:.1f} ms, "
            f"about {steps * each / 3600:.1f} h of one core"
        )


def _seconds_of_a_node_step(left: Sequence[Trial]) -> float:
    together = [replace(trial, steps=PROBED_STEPS) for trial in max(stacks(left), key=len)]
    rows = run_together(together)
    return sum(float(str(row["cpu_seconds"])) for row in rows) / sum(trial.node_steps for trial in together)


def work(study: str, limit: int | None, compiled: bool) -> None:
    """Run the trials that have no row yet, in the order of the plan, several at a time."""
    left = missing(PLANS[study](), read(path_of(study)))[:limit]
    done = 0
    for together in stacks(left):
        started = time.perf_counter()
        for row, trial in zip(run_together(together, compiled), together, strict=True):
            append(path_of(study), row)
            done += 1
            print(f"{done}/{len(left)} {_told(trial, row)}", flush=True)
        print(f"  took {time.perf_counter() - started:.0f} s", flush=True)


def _told(trial: Trial, row: Mapping[str, Any]) -> str:
    step, loss = list(row["losses"].items())[-1]
    setup = f"feedback={trial.feedback} nodes={trial.nodes} H={trial.sync_every} seed={trial.seed}"
    return f"{trial.variant} {setup}: {loss} at {step}"


def tables() -> None:
    """Print every table that has rows."""
    for study, table in (("codecs", codec_table), ("outer", outer_table)):
        rows = read(path_of(study))
        if rows:
            print(f"## {study}\n\n{table(rows)}\n")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan")
    commands.add_parser("tables")
    runs = commands.add_parser("run")
    runs.add_argument("study", choices=PLANS)
    runs.add_argument("--limit", type=int, help="end after so many trials")
    runs.add_argument("--compiled", action="store_true", help="fuse operations with torch.compile: a fifth faster")
    options = parser.parse_args()
    match options.command:
        case "plan":
            plan()
        case "tables":
            tables()
        case _:
            work(options.study, options.limit, options.compiled)


if __name__ == "__main__":
    main()
