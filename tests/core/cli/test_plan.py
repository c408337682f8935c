"""The plan as text, JSON and picture; what it cannot plan is refused with a sentence."""

import json
from pathlib import Path

import pytest

from gradientmail_core.cli.plan import main
from gradientmail_core.errors import ConfigurationError

FAST = ["--nodes", "2", "--bandwidth", "10Gbit", "--step-seconds", "0.2", "--presets", "decoupled,local_sgd"]


def test_presets_stand_side_by_side_and_one_is_recommended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, file = tmp_path / "out" / "plan.png", tmp_path / "out" / "plan.json"
    assert main([*FAST, "--parameters", "10M", "--picture", str(picture), "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "decoupled" in said and "local_sgd" in said and "Start from DiLoCo." in said
    assert picture.read_bytes()[:4] == b"\x89PNG"
    figures = json.loads(file.read_text())
    assert [row["preset"] for row in figures["presets"]] == ["decoupled", "local_sgd"]
    for row in figures["presets"]:
        assert 0 < row["utilization"] <= 1 and row["bytes_up"] > 1e6 and row["requests"] > 0 and row["dollars"] > 0
    assert figures["recommended"] in ("decoupled", "local_sgd")


def test_a_models_configuration_gives_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024})
    )
    assert main([*FAST[:-1], "decoupled", "--config", str(config)]) == 0
    assert "124 M parameters" in capsys.readouterr().out


def test_a_narrow_line_is_told_what_would_suit_it(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--nodes", "6", "--bandwidth", "20Mbit", "--step-seconds", "0.2", "--presets", "decoupled"]
    assert main([*line, "--parameters", "50M"]) == 0
    said = capsys.readouterr().out
    assert "does not keep up" in said and "sync_every=" in said and "fragments=6" in said


def test_what_cannot_be_planned_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="No model size"):
        main(FAST)
    with pytest.raises(ConfigurationError, match=r"no model configuration.*config\.json"):
        main([*FAST, "--config", str(tmp_path / "absent.json")])
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="names no hidden size"):
        main([*FAST, "--config", str(tmp_path / "odd.json")])
    with pytest.raises(SystemExit):
        main(["--parameters", "10M", "--bandwidth", "wide"])
    assert "is not a bandwidth such as 100Mbit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--parameters", "10M", "--presets", "best"])
    assert "not among standard" in capsys.readouterr().err
