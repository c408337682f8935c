"""The whole demo, made small: real processes, a late join, a kill, a table, a picture and JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_lightning.demo.command import main

SMALL = ["--width=32", "--layers=1", "--batch=2", "--context=16", "--evaluate-every=20", "--evaluation-windows=32"]


def test_a_small_demo_ends_with_table_picture_and_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradientmail_core.cli.main", "demo", "--seeds=0", "--steps=200", *SMALL]
    command += [f"--out={tmp_path}", f"--json={tmp_path / 'figures.json'}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    assert "with SIGKILL" in result.stdout and "Held-out loss after 200 steps" in result.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert 0 < figures["merged_loss"] < 6 and 0 < figures["single_loss"] < 6
    assert figures["runs"]["merged"][0]["commits"] >= 9
    assert len(figures["joins"]) == len(figures["kills"]) == 1
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("flag", "said"), [("--seeds=one", "whole numbers"), ("--nodes=1", "from 2 to")])
def test_bad_options_are_explained(flag: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=said):
        main([flag, f"--out={tmp_path}"])
