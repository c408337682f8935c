"""The outer step and the merges beside one memory copy, in one run.

    python benchmarks/outer.py [--json FILE] [--repeat 7]

A row has ``name``, ``seconds`` (best of the repeats), ``copy_ratio`` (against one ``np.copyto`` of as many fp32
values, best of as many repeats, taken in turn with the operation) and ``gb_per_s`` (bytes of the operation's
fp32 inputs and outputs, each counted once). Steps work on 64 Mi parameters, merges on 8 deltas of 16 Mi, eight
pieces each. Targets on two idle cores: ``nesterov_step`` at most 2.0, ``rda_merge_8`` at most 30.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gradientmail_core.algorithms.merge import Contribution, Median, Merge, Rda, WeightedMean
from gradientmail_core.algorithms.outer import SGD, Adam, HeavyBall, Nesterov, Outer
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.encoded import InMemory
from gradientmail_core.tensors.kernels import thread_count
from gradientmail_core.tensors.schema import FragmentLayout, Piece

STEP_SIZE = 64 << 20
MERGE_SIZE = 16 << 20
MERGED = 8
PIECES = 8


@dataclass(frozen=True)
class Row:
    """One operation's figures."""

    name: str
    seconds: float
    copy_seconds: float
    copy_ratio: float
    gb_per_s: float


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def row(name: str, work: Callable[[], object], size: int, arrays: int, repeat: int) -> Row:
    """Time ``work`` in turn with a copy of ``size`` values; ``arrays`` of that size are read or written."""
    source, target = np.ones(size, np.float32), np.zeros(size, np.float32)
    pairs = [(seconds_of(lambda: np.copyto(target, source)), seconds_of(work)) for _ in range(repeat + 1)][1:]
    copy, seconds = (min(times) for times in zip(*pairs, strict=True))
    return Row(name, seconds, copy, seconds / copy, 4 * size * arrays / seconds / 1e9)


def steps(repeat: int) -> Iterator[Row]:
    """Every outer optimizer on one large fragment."""
    outers: dict[str, Outer] = {"nesterov": Nesterov(), "heavy_ball": HeavyBall(), "sgd": SGD(), "adam": Adam()}
    theta, delta = np.ones(STEP_SIZE, np.float32), np.full(STEP_SIZE, 1e-3, np.float32)
    for name, outer in outers.items():
        state = tuple(np.zeros(STEP_SIZE, np.float32) for _ in outer.state_names())
        step = partial(outer.step, theta, delta, state, 50)
        yield row(f"{name}_step", step, STEP_SIZE, 3 + 2 * len(state), repeat)


def merges(repeat: int) -> Iterator[Row]:
    """Every merge over eight uncompressed deltas."""
    each = MERGE_SIZE // PIECES
    layout = FragmentLayout(0, tuple(Piece(f"t{index}", (each,), index * each) for index in range(PIECES)))
    deltas = [np.random.default_rng(index).standard_normal(MERGE_SIZE, np.float32) for index in range(MERGED)]
    contributions = [
        Contribution(f"node{index}", 1.0 + index, InMemory(codec_named("F32"), [values.view(np.uint8)]).read)
        for index, values in enumerate(deltas)
    ]
    named: dict[str, Merge] = {"mean": WeightedMean(), "rda": Rda(), "median": Median()}
    for name, merge in named.items():
        yield row(f"{name}_merge_{MERGED}", partial(merge, contributions, layout), MERGE_SIZE, MERGED + 1, repeat)


def main() -> None:
    """Print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    rows = []
    print(f"{thread_count()} threads\n{'operation':18}{'ms':>9}{'copies':>9}{'GB/s':>9}")
    for found in (*steps(options.repeat), *merges(options.repeat)):
        print(f"{found.name:18}{1e3 * found.seconds:9.1f}{found.copy_ratio:9.2f}{found.gb_per_s:9.1f}", flush=True)
        rows.append(asdict(found))
    if options.json:
        options.json.write_text(
            json.dumps({"threads": thread_count(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
