"""What compression and outer optimizers cost in loss, on real text, with committed logs.

    python -m benchmarks.quality plan                   trials and node steps still to run, and their time here
    python -m benchmarks.quality run codecs|outer       run what is missing; stop and resume at will
    python -m benchmarks.quality tables                 recompute the tables from the logs

A trial runs on one core. Run as ``OMP_NUM_THREADS=1 GRADIENTMAIL_THREADS=1 nice -n 19 python -m ...`` to stay
out of everyone's way. Rows are appended to ``benchmarks/quality/logs/<study>.jsonl`` when a trial ends.
"""

import argparse
import time

from benchmarks.quality.log import append, missing, path_of, read
from benchmarks.quality.plans import PLANS
from benchmarks.quality.tables import codec_table, outer_table
from benchmarks.quality.trial import Trial, run


def plan() -> None:
    """Say what is left, timed by a short trial."""
    probe = run(Trial(study="probe", variant="probe", nodes=2, steps=100, seed=0))
    each = float(str(probe["cpu_seconds"])) / 200
    for study, trials in PLANS.items():
        left = missing(trials(), read(path_of(study)))
        steps = sum(trial.node_steps for trial in left)
        print(f"{study}: {len(left)} trials, {steps} node steps, about {steps * each / 3600:.1f} h of one core")


def work(study: str, limit: int | None) -> None:
    """Run the trials that have no row yet, in the order of the plan."""
    left = missing(PLANS[study](), read(path_of(study)))
    for number, trial in enumerate(left[:limit], 1):
        started = time.perf_counter()
        row = run(trial)
        append(path_of(study), row)
        last = list(dict(row["losses"]).items())[-1]  # type: ignore[call-overload]  # a row is plain JSON
        print(
            f"{number}/{len(left)} {trial.variant} feedback={trial.feedback} nodes={trial.nodes} "
            f"H={trial.sync_every} seed={trial.seed}: {last[1]} at {last[0]}, {time.perf_counter() - started:.0f} s",
            flush=True,
        )


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
    options = parser.parse_args()
    match options.command:
        case "plan":
            plan()
        case "tables":
            tables()
        case _:
            work(options.study, options.limit)


if __name__ == "__main__":
    main()
