"""Closing the same round with this library: ``python ours.py FOLDER BUDGET``; see ``gradientmail_002.py``.

Contributions are kept as a closer keeps them, in their codec's bytes, up to ``BUDGET`` bytes in memory and the rest
on disk. Prints seconds and bytes as JSON and writes ``ours.bin``.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.peers.watch import Watch, private_bytes, supply_memory
from gradientmail_core.algorithms.merge import Contribution, Rda
from gradientmail_core.algorithms.outer import Nesterov, Reached
from gradientmail_core.algorithms.spool import Spool
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.encoded import InMemory
from gradientmail_core.tensors.schema import FragmentLayout, Piece

SIDE = 1024
OUTER = Nesterov(lr=0.7, momentum=0.9, warmup=0.0)


def main(folder: Path, budget: int) -> None:
    """Read, close the round, say what it took."""
    before = private_bytes()
    theta = np.fromfile(folder / "theta.bin", np.float32)
    pieces = tuple(Piece(f"w{at:03d}", (SIDE, SIDE), at * SIDE * SIDE) for at in range(theta.size // SIDE**2))
    layout, codec = FragmentLayout(0, pieces), codec_named("F32")
    spool = Spool(budget)
    with Watch() as watch:
        contributions = []
        for index in range(8):
            body = np.frombuffer((folder / f"delta{index}.bin").read_bytes(), np.uint8)
            contributions.append(Contribution(f"node{index}", 1.0, spool.kept(InMemory(codec, [body])).read))
            del body
        supply_memory()
        inputs, started = private_bytes(), time.perf_counter()
        delta = Rda()(contributions, layout).delta
        start, momentum = np.zeros(theta.size, np.float32), np.empty_like(theta)
        OUTER.step(theta, delta, (start,), 1, 8, into=Reached(delta, (momentum,)))
        seconds = time.perf_counter() - started
    delta.tofile(folder / "ours.bin")
    print(json.dumps({"seconds": seconds, "peak_bytes": watch.most - before, "extra_bytes": watch.most - inputs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
