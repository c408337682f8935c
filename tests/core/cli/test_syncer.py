"""The syncer as a process: it joins a run in a directory without a training framework, and SIGTERM ends it cleanly."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gradientmail_core as gm
from gradientmail_core.cli.syncer import main
from gradientmail_core.sim.world import ToyModel

PROGRAM = """
import sys
for framework in ("torch", "mlx", "lightning", "transformers"):
    sys.modules[framework] = None
from gradientmail_core.cli.syncer import main
sys.exit(main(sys.argv[1:]))
"""


def leases(run: Path) -> list[str]:
    return sorted(path.name.split("-")[1][0] for path in (run / "live/leases/s").glob("[!.]*"))


def until(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition(), process.communicate(timeout=10)[1] if process.poll() is not None else "nothing happened"


def test_sigterm_ends_a_serving_syncer_with_code_0_and_a_farewell(tmp_path: Path) -> None:
    run = tmp_path / "run"
    session = gm.Session(ToyModel(), mailbox=run, algorithm=gm.DiLoCo(), node="a", callbacks=[])
    session.join()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run), "--node", "s"], stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: "s" in leases(run), process)
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=60)[1]
        assert process.returncode == 0, log
        assert leases(run)[-1] == "x" and "s left after" in log
    finally:
        process.kill()
        session.abort()


def test_a_mistyped_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gm.GradientMailError):
        main([str(tmp_path / "typo")])
