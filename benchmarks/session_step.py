"""What a session adds to an optimizer step when nothing is due.

    python benchmarks/session_step.py [--json FILE]

Joins a run of one node with a model of 8 fragments whose rounds lie far ahead, and times ``session.step()`` alone,
in batches of 1,000 calls. Prints the median of the batches, beside an empty Python call in the same run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gradientmail_core as gm

BATCHES, CALLS = 50, 1000


def microseconds(call: Callable[[], object]) -> float:
    """Median over the batches of one call's time."""
    times = []
    for _ in range(BATCHES):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    return statistics.median(times)


def measured() -> dict[str, float]:
    """Microseconds of a step with nothing due, and of a call that does nothing."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    settings = gm.DiLoCo(sync_every=10**6, fragments=8)
    with gm.Session(model, mailbox=gm.MemoryMailbox(), algorithm=settings, callbacks=[]) as session:
        return {"session_step_us": microseconds(session.step), "empty_call_us": microseconds(lambda: None)}


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measured()
    print(f"session.step() with nothing due: {figures['session_step_us']:.2f} us")
    print(f"a call that does nothing:        {figures['empty_call_us']:.2f} us")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
