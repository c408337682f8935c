"""Closing rounds in gradientmail 0.0.2, from outside: ``python gradientmail_002.py FOLDER``, in its environment.

Written from what ``help()`` says of ``DiLoCoAggregator``, ``FragmentState``, ``Contribution`` and ``TensorBytes``; its
sources were not read. The folder holds ``theta.bin`` and ``delta0.bin`` … ``delta7.bin``, fp32 of 1024 columns in
little-endian. Prints seconds and bytes as JSON and writes ``peer.bin``, the parameters after the last round.
"""

import sys
from pathlib import Path

from gradientmail import DiLoCo, Rda, Schema, TensorBytes
from gradientmail.adapters import default_backend
from gradientmail.algorithms import Contribution, FragmentState
from gradientmail.algorithms.diloco import DiLoCoAggregator
from gradientmail.serialization import ParameterSpec

from benchmarks.peers.watch import closings, private_bytes

SIDE = 1024
BYTES = 4 * SIDE * SIDE


def tensors(path: Path) -> dict[str, TensorBytes]:
    """A file as named tensors of 1024 x 1024."""
    with path.open("rb") as file:
        return {
            f"w{index:03d}": TensorBytes("F32", (SIDE, SIDE), file.read(BYTES))
            for index in range(path.stat().st_size // BYTES)
        }


def main(folder: Path) -> None:
    """Close the rounds, say what they took."""
    before = private_bytes()
    names = [f"w{index:03d}" for index in range((folder / "theta.bin").stat().st_size // BYTES)]
    schema = Schema(tuple(ParameterSpec(name, "F32", (SIDE, SIDE)) for name in names))
    config = DiLoCo(sync_every=100, fragments=1, in_flight=1, merge=Rda(), outer_lr=0.7, outer_momentum=0.9)
    aggregator = DiLoCoAggregator(config, schema, names, default_backend())

    def arrived() -> list[Contribution]:
        return [
            Contribution(f"node{index}", 100, 100, 800, 0.1, False, tensors(folder / f"delta{index}.bin"))
            for index in range(8)
        ]

    def closed(held: FragmentState, contributions: list[Contribution], version: int) -> FragmentState:
        return aggregator.close_round(held, contributions).state

    state = closings(before, lambda: FragmentState(0, tensors(folder / "theta.bin"), {}), arrived, closed)
    (folder / "peer.bin").write_bytes(b"".join(bytes(state.theta[name].data) for name in names))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
