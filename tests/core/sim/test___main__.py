"""The search as ``make simulate`` runs it."""

import json
import sys
from pathlib import Path

import pytest

from gradientmail_core.sim import __main__ as command


def test_a_search_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr(
        sys, "argv", ["sim", "--seeds", "2", "--first", "1000", "--processes", "1", "--json", str(file)]
    )
    assert command.main() == 0
    figures = json.loads(file.read_text())
    assert figures["seeds"] == 2 and figures["violations"] == [] and figures["seeds_per_second"] > 0
