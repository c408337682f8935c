"""Loading the committed model from outside: the newest commit, and no trace."""

from pathlib import Path

import pytest
import torch

import gradientmail_core as gm
from gradientmail_core.adapters.torch import TorchModel


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))


def test_align_loads_the_committed_model() -> None:
    mailbox = gm.MemoryMailbox()
    module = network()
    with gm.Session(module, mailbox=mailbox, algorithm=gm.DiLoCo(sync_every=2, fragments=2)) as session:
        for _ in range(4):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.1)
            session.step()
    other = network(seed=1)
    gm.align(other, mailbox=mailbox)
    assert all(torch.equal(one, two) for one, two in zip(module.parameters(), other.parameters(), strict=True))


def test_align_loads_statistics_where_the_run_merges_them() -> None:
    mailbox = gm.MemoryMailbox()
    module, other = torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8)
    model = TorchModel(module, buffers="mean")
    with gm.Session(model, mailbox=mailbox, algorithm=gm.DiLoCo(sync_every=1, fragments=1)) as session:
        module(torch.rand(16, 8))
        expected = module.state_dict()["running_mean"].clone()
        session.step()
    gm.align(other, mailbox=mailbox)
    assert torch.allclose(other.state_dict()["running_mean"], expected, rtol=0.01)
    assert expected.abs().max() > 0.001


def test_align_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(gm.GradientMailError):
        gm.align(network(), mailbox=str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()


def test_another_model_is_refused_with_a_diff() -> None:
    mailbox = gm.MemoryMailbox()
    with gm.Session(network(), mailbox=mailbox, algorithm=gm.DiLoCo(), callbacks=[]) as session:
        session.step()
    with pytest.raises(gm.SchemaMismatch, match=r"0\.weight"):
        gm.align(torch.nn.Sequential(torch.nn.Linear(9, 16)), mailbox=mailbox)
