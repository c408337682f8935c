"""An exported run is what its nodes hold, read by safetensors itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import gradientmail_core as gm
from gradientmail_core.cli.export import main
from gradientmail_core.errors import ConfigurationError, RunMismatch


@pytest.fixture
def run(tmp_path: Path) -> tuple[str, torch.nn.Module]:
    """A run of three fragments, one tensor of which is cut by rows, and the model its only node ended with."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 4), torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    url = (tmp_path / "run").as_uri()
    with gm.Session(model, mailbox=url, algorithm=gm.DiLoCo(sync_every=3, fragments=3, overlap_steps=0)) as session:
        for _ in range(6):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
            session.step()
    return url, model


def test_the_file_holds_the_committed_model(
    run: tuple[str, torch.nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, model = run
    assert main([url, str(tmp_path / "model.safetensors")]) == 0
    assert "at step 6: 5 tensors, 277 values" in capsys.readouterr().out
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["gradientmail_step"] == "6"
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_half_precision(run: tuple[str, torch.nn.Module], tmp_path: Path) -> None:
    url, model = run
    main([url, str(tmp_path / "half.safetensors"), "--dtype", "F16"])
    weight = load_file(tmp_path / "half.safetensors")["1.weight"]
    assert weight.dtype == torch.float16
    assert np.allclose(weight.float(), model.state_dict()["1.weight"], rtol=1e-3)


def test_of_a_gossip_run_it_is_the_mean_of_its_nodes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, url = torch.nn.Linear(4, 3), (tmp_path / "gossip").as_uri()
    with gm.Session(model, mailbox=url, algorithm=gm.FactoredGossip.global_m1(sync_every=3, fragments=2)) as session:
        for _ in range(9):
            with torch.no_grad():
                model.weight.add_(0.1)
            session.step()
    assert main([url, str(tmp_path / "mean.safetensors")]) == 0
    loaded = load_file(tmp_path / "mean.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_what_cannot_be_exported_is_said(run: tuple[str, torch.nn.Module], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunMismatch, match="There is no run"):
        main([(tmp_path / "empty").as_uri(), str(tmp_path / "model.safetensors")])
    with pytest.raises(ConfigurationError, match="There is no directory"):
        main([run[0], str(tmp_path / "nowhere" / "model.safetensors")])
    with pytest.raises(ConfigurationError, match="cannot be written"):
        main([run[0], str(tmp_path / "empty")])
