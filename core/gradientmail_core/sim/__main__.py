"""Play many random runs side by side and report what broke: ``python -m gradientmail_core.sim --seeds 1000``.

Each seed is a whole run with faults (:mod:`gradientmail_core.sim.swarm`). A violated invariant is printed with its
seed; ``--seed N`` plays that one again and tells its story. Exit code 1 if anything was violated.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from gradientmail_core.sim.scenario import scenario
from gradientmail_core.sim.swarm import Verdict, play, story

REPORT_SECONDS = 5.0


def verdict(seed: int) -> Verdict:
    """The verdict on one seed."""
    return play(scenario(seed))


def verdicts(first: int, count: int, processes: int) -> Iterator[Verdict]:
    """Verdicts of ``count`` seeds, in order, from several processes."""
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(verdict, range(first, first + count), chunksize=4)


def search(first: int, count: int, processes: int) -> dict[str, object]:
    """Play the seeds with progress on stderr; the figures as ``make simulate JSON=FILE`` writes them."""
    started = reported = time.monotonic()
    violations: list[dict[str, object]] = []
    rounds = 0
    for done, result in enumerate(verdicts(first, count, processes), 1):
        rounds += result.rounds
        if result.violations:
            violations.append(asdict(result))
            print(f"seed {result.seed}: {'; '.join(result.violations)}", flush=True)
        if time.monotonic() - reported > REPORT_SECONDS or done == count:
            reported = time.monotonic()
            rate = done / (reported - started)
            print(f"{done} of {count} seeds, {len(violations)} violated, {rate:.1f} seeds/s", file=sys.stderr)
    seconds = time.monotonic() - started
    return {
        "seeds": count,
        "violations": violations,
        "rounds": rounds,
        "seconds": seconds,
        "seeds_per_second": count / seconds,
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m gradientmail_core.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="play this one and print what happened")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.seed is not None:
        result = story(scenario(options.seed), print)
        print(result)
        return 1 if result.violations else 0
    figures = search(options.first, options.seeds, options.processes)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2))
    print(f"{figures['seeds']} seeds, {figures['rounds']} rounds, {figures['seeds_per_second']:.2f} seeds per second")
    return 1 if figures["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
