"""``python -m gradientmail_core.sim --seeds N [--first N] [--json FILE]``: what ``make simulate`` runs."""

import argparse
import json
import os
import sys
from pathlib import Path

from gradientmail_core.sim.search import search, told
from gradientmail_core.sim.shrinking import PLAYS_MOST


def main() -> int:
    """Search; exit code 1 if anything was violated, after the story of the first that was."""
    parser = argparse.ArgumentParser(prog="python -m gradientmail_core.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = search(
        options.first,
        options.seeds,
        options.processes,
        found=lambda verdict: print(f"seed {verdict.seed}: {'; '.join(verdict.violations)}", flush=True),
        progress=lambda state: print(
            f"{state.done} of {state.count} seeds, {state.violated} violated, {state.seeds_per_second:.1f} seeds/s",
            file=sys.stderr,
            flush=True,
        ),
    )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{figures['seeds']} seeds, {figures['rounds']} rounds, {figures['seeds_per_second']:.2f} seeds per second")
    violations = figures["violations"]
    if isinstance(violations, list) and violations:
        told(violations[0]["seed"], print, PLAYS_MOST)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
