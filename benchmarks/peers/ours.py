"""Closing the same rounds with this library: ``python ours.py FOLDER BUDGET [judged]``; see ``gradientmail_002.py``.

Contributions are kept as a closer keeps them, in their codec's bytes, up to ``BUDGET`` bytes in memory and the rest
on disk; results lie in recycled memory, as a closer's do. With ``judged`` the norms of all but the last are known when
closing begins: a closer takes them as snapshots arrive, to judge them. Prints seconds and bytes as JSON and writes
``ours.bin``.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.peers.watch import closings, private_bytes
from gradientmail_core.algorithms.merge import Contribution, Rda, piece_squares
from gradientmail_core.algorithms.outer import Nesterov, Reached
from gradientmail_core.algorithms.spool import Spool
from gradientmail_core.tensors import recycled
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.encoded import InMemory
from gradientmail_core.tensors.schema import FragmentLayout, Piece

SIDE = 1024
OUTER = Nesterov(lr=0.7, momentum=0.9, warmup=0.0)


def count(folder: Path) -> int:
    """How many matrices the fragment has."""
    return (folder / "theta.bin").stat().st_size // (4 * SIDE * SIDE)


def begun(folder: Path) -> Reached:
    """The parameters and the momentum before the first round."""
    theta = np.fromfile(folder / "theta.bin", np.float32)
    return Reached(theta, (np.zeros(theta.size, np.float32),))


def main(folder: Path, budget: int, judged: bool) -> None:
    """Close the rounds, say what they took."""
    before = private_bytes()
    pieces = tuple(Piece(f"w{at:03d}", (SIDE, SIDE), at * SIDE * SIDE) for at in range(count(folder)))
    layout, codec = FragmentLayout(0, pieces), codec_named("F32")

    def arrived() -> list[Contribution]:
        spool, contributions = Spool(budget), []
        for index in range(8):
            body = np.fromfile(folder / f"delta{index}.bin", np.uint8)
            contributions.append(Contribution(f"node{index}", 1.0, spool.kept(InMemory(codec, [body])).read))
            del body  # a spooled one is a copy: its memory is free before the next arrives
        if not judged:
            return contributions
        *others, last = contributions
        return [*(replace(one, squares=piece_squares(one.read, layout)) for one in others), last]

    def closed(held: Reached, contributions: list[Contribution], version: int) -> Reached:
        delta = Rda()(contributions, layout, recycled.empty(layout.size)).delta
        there = Reached(delta, (recycled.empty(layout.size),))
        OUTER.step(held.theta, delta, held.state, version, len(contributions), into=there)
        return there

    reached = closings(before, lambda: begun(folder), arrived, closed)
    reached.theta.tofile(folder / "ours.bin")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), judged=sys.argv[3:] == ["judged"])
