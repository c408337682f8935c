"""Eight fp32 deltas of a 64 Mi-parameter fragment, merged with RDA and stepped, beside gradientmail 0.0.2.

    python3.12 -m venv peer && peer/bin/pip install gradientmail==0.0.2 numpy torch
    python benchmarks/peers --peer peer/bin/python [--json FILE] [--rounds 3] [--mi 64] [--inputs FOLDER]

Both sides read the same files and take turns, each run in a process of its own, and another one begins each turn.
A run closes five rounds one after the other, as a training run does: each with contributions that were just read,
from the parameters and momentum that the round before left. Timed is closing, from inputs in memory or spooled to new
parameters and momentum. ``first_seconds`` is the first round, whose memory nobody has used before; just before it
another process touches and frees 4 GiB, so that neither side waits for the host of a virtual machine to supply
memory. ``seconds`` is the median of the last three, which is what a run sees, and ``cpu_seconds`` the CPU they took,
waits in busy loops included. ``peak_bytes`` is the most private memory
at any time, on top of the imports, ``extra_bytes`` the most that closing needed beyond what was there when it began.
Medians over the turns. The parameters of both must agree in the end.

``ours`` keeps contributions as a closer does by default (``DiLoCo.merge_memory``), ``ours_in_memory`` all of them in
memory; in both all arithmetic is timed, as it is for the peer. ``ours_judged`` is ``ours`` from the moment when the
last contribution has arrived: a closer takes each one's norms on arrival, to judge it, so those of the first seven are
not timed. The peer, whose interface is closing alone, does all its work then.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradientmail_core.algorithms.diloco import DiLoCo

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SIDE = 1024
AGREE = 1e-5


def write_inputs(folder: Path, mi: int) -> None:
    """Parameters and eight deltas that agree in part, ``mi`` Mi values each."""
    rng = np.random.default_rng(0)
    size = mi * SIDE * SIDE
    common = rng.standard_normal(size, np.float32)
    rng.standard_normal(size, np.float32).tofile(folder / "theta.bin")
    for index in range(8):
        ((common + rng.standard_normal(size, np.float32)) * np.float32(1e-3)).tofile(folder / f"delta{index}.bin")


def measured(command: Sequence[str]) -> dict[str, float]:
    """The figures that a child process prints."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT / "core"), str(ROOT)]))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def agreement(folder: Path) -> float:
    """The largest difference between the two results."""
    ours, peer = (np.fromfile(folder / f"{name}.bin", np.float32) for name in ("ours", "peer"))
    return float(np.abs(ours - peer).max())


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    """Measure, print, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the Python that has gradientmail 0.0.2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inputs", type=Path, help="a folder that keeps the inputs from one call to the next")
    parser.add_argument("--mi", type=int, default=64, help="parameters of the fragment in Mi")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = options.inputs or Path(place)
        if not (folder / "delta7.bin").exists():
            write_inputs(folder, options.mi)
        place = str(folder)
        ours = [sys.executable, str(HERE / "ours.py"), place]
        turns: list[tuple[str, list[str]]] = [
            ("peer", [options.peer, str(HERE / "gradientmail_002.py"), place]),
            ("ours", [*ours, str(DiLoCo().merge_memory)]),
            ("ours_in_memory", [*ours, str(2**40)]),
            ("ours_judged", [*ours, str(DiLoCo().merge_memory), "judged"]),
        ]
        runs: dict[str, list[dict[str, float]]] = {name: [] for name, _ in turns}
        for _ in range(options.rounds):
            for name, command in turns:
                runs[name].append(measured(command))
                print(name, json.dumps(runs[name][-1]), flush=True)
            turns = [*turns[1:], turns[0]]
        difference = agreement(folder)
    if difference > AGREE:
        raise SystemExit(f"The results differ by {difference:g}.")
    figures: dict[str, object] = {name: medians(taken) for name, taken in runs.items()}
    peer = medians(runs["peer"])
    for name in [name for name in runs if name != "peer"]:
        ratios = {figure: peer[figure] / max(value, 1e-9) for figure, value in medians(runs[name]).items()}
        figures[f"{name}_ratios"] = ratios
        print(f"{name}: {', '.join(f'{figure} {ratio:.2f}x less' for figure, ratio in ratios.items())}")
    figures |= {"mi": options.mi, "rounds": options.rounds, "load": os.getloadavg()[0], "difference": difference}
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
