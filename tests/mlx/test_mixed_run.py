"""A Hugging Face Trainer and mlx-lm train one Llama; one is killed and comes back, and both end on one commit.

Who comes back has imported everything before its former self is killed: alone, the other would learn the few rows by
heart meanwhile, and then take the steps of a fresh optimizer for an outlier's. Each wait lasts until what it waits for
has happened or a node is gone: on a busy machine, importing two frameworks takes minutes. The test's own time-out is
for hangs.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from gradientmail_core.mailbox import DirectoryMailbox
from gradientmail_core.sim.checks import forks, tape

ROOT = Path(__file__).parents[2]


class Run:
    """Node processes around one directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.mailbox = DirectoryMailbox(home / "run")
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, framework: str, min_nodes: int, *, held: bool = False) -> None:
        """A node named after its framework; a ``held`` one joins when it finds ``go``."""
        options = {"framework": framework, "node": framework, "min_nodes": min_nodes, "out": str(self.home)}
        options["held"] = held
        options["mailbox"] = (self.home / "run").as_uri()
        command = [sys.executable, "-m", "tests.mlx.mixed_program", json.dumps(options)]
        places = os.pathsep.join([str(ROOT / "core"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
        self.processes[framework] = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.started.append(self.processes[framework])

    def rounds_of(self, node: str, after: int = -1) -> list[int]:
        """Rounds later than ``after`` that the node's snapshot is in."""
        if not (self.home / "run" / "manifest.json").exists():
            return []
        records = asyncio.run(tape(self.mailbox))
        return [
            record.round
            for record in records
            if record.round > after and node in {participant.node for participant in record.participants}
        ]

    def wait(self, node: str, count: int, after: int = -1) -> int:
        """Wait until the node is in ``count`` more rounds; the last of them."""
        while len(found := self.rounds_of(node, after)) < count:
            gone = {name: process.returncode for name, process in self.processes.items() if process.poll() is not None}
            assert not gone or set(gone.values()) == {-signal.SIGKILL}, gone
            time.sleep(0.3)
        return max(found)

    def wait_for(self, file: str) -> None:
        """Wait until a node has written ``file``."""
        while not (self.home / file).exists():
            assert all(process.poll() is None for process in self.processes.values())
            time.sleep(0.1)

    def result(self, node: str) -> dict[str, float | str]:
        """What the node printed at its end."""
        output, _ = self.processes[node].communicate()
        assert self.processes[node].returncode == 0, output
        found: dict[str, float | str] = json.loads(output.strip().splitlines()[-1])
        return found


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    for process in run.started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torch_and_mlx_train_one_model_through_a_kill_and_a_return(run):
    for framework in ("torch", "mlx"):
        run.start(framework, min_nodes=2)
    run.wait("mlx", 6)
    first = run.processes["mlx"]
    run.start("mlx", min_nodes=1, held=True)
    run.wait_for("ready")
    killed_after = max(run.rounds_of("mlx"))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    run.wait("torch", 2, killed_after)
    (run.home / "go").touch()
    back = run.wait("mlx", 6, killed_after + 2)
    step = max(record.step for record in asyncio.run(tape(run.mailbox)) if record.round <= back)
    (run.home / "stop").write_text(str(step + 64))
    results = {framework: run.result(framework) for framework in ("torch", "mlx")}
    assert results["torch"]["digest"] == results["mlx"]["digest"]
    assert results["torch"]["after"] == pytest.approx(results["mlx"]["after"], rel=1e-4)
    assert results["torch"]["after"] < 0.7 * results["torch"]["before"]
    assert results["mlx"]["after"] < results["mlx"]["before"]
    assert asyncio.run(forks(run.mailbox)) == []
