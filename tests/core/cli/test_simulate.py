"""The three uses of ``gradientmail simulate``: search, story, fleet."""

import json
from pathlib import Path

import pytest

from gradientmail_core.cli import simulate
from gradientmail_core.cli.simulate import main
from gradientmail_core.errors import ConfigurationError
from tests.scenarios.test_mutations import commits_deleted_after_two_cycles


def test_a_search_says_how_many_seeds_it_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out" / "figures.json"
    assert main(["--seeds", "2", "--first", "1000", "--processes", "1", "--json", str(file)]) == 0
    assert "2 seeds" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["seeds"] == 2 and figures["violations"] == [] and figures["seeds_per_second"] > 0


def test_one_seed_tells_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "1001"]) == 0
    said = capsys.readouterr().out
    assert "seed 1001:" in said and "closed round" in said and "no invariant was violated" in said


def test_a_failing_seed_is_shrunk_to_its_shortest_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradientmail_core.cli.simulate.PLAYS_MOST", 2)
    commits_deleted_after_two_cycles(monkeypatch)
    assert main(["--seed", "1007"]) == 1
    said = capsys.readouterr().out
    assert "The shortest schedule that fails in the same way" in said and "Scenario(seed=1007" in said


def test_a_longer_lease_time_out_asks_less(tmp_path: Path) -> None:
    lists = []
    for lease in ("1min", "10min"):
        file = tmp_path / f"{lease}.json"
        line = ["--nodes", "3", "--hours", "0.2", "--parameters", "1M", "--lease-timeout", lease, "--json", str(file)]
        assert main(line) == 0
        lists.append(json.loads(file.read_text())["requests_per_day"])
    assert lists[1] < 0.8 * lists[0]


def test_a_fleet_reports_what_a_run_of_its_size_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.json"
    line = ["--nodes", "4", "--hours", "0.1", "--mtbf", "3min", "--down", "10s", "--bandwidth", "1Gbit"]
    monkeypatch.setattr(simulate, "REPORT_SECONDS", 0.0)
    assert main([*line, "--parameters", "10M", "--sync-every", "40", "--json", str(file)]) == 0
    said, progress = capsys.readouterr()
    assert "50% of 0.1 h simulated" in progress
    assert "4 nodes for 0.1 h" in said and "compute utilization" in said and "a node and day" in said
    figures = json.loads(file.read_text())
    assert 0.7 < figures["goodput"] < 1 and figures["rounds"] > 10 and figures["faults"] > 2
    assert figures["bytes_up_per_day"] > 1e9 and figures["dollars_per_day"] > 0


def test_no_time_is_no_simulation() -> None:
    with pytest.raises(ConfigurationError, match="no span to simulate"):
        main(["--nodes", "2", "--hours", "0"])
