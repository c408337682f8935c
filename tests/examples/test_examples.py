"""The examples run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_trains_and_commits(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / name), (tmp_path / "run").as_uri()]
    environment = {**os.environ, "MLX_DISABLE_COMPILE": "1"}  # compiling for a CPU takes longer than the training
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "run" / "tape").rglob("*-0")), "rounds were committed"
