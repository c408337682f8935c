"""The README's Lightning program runs as it stands, with any model and data; only its mount point is elsewhere."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_core.mailbox import open_mailbox
from gradientmail_core.session import aligning

ROOT = Path(__file__).resolve().parents[2]
SHARED = "file:///mnt/shared"
STEPS = 150


class Model(LightningModule):
    """Ends its training before the snippet's ``max_steps``, which are many."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 8)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.trainer.should_stop = self.global_step >= STEPS
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_lightning_program_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (program,) = [block for block in blocks if "gradientmail_lightning" in block]
    assert SHARED in program
    monkeypatch.setattr(
        aligning, "open_mailbox", lambda url, **options: open_mailbox(url.replace(SHARED, tmp_path.as_uri()), **options)
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": Model(), "data": DataLoader(TensorDataset(torch.rand(64, 3)), batch_size=4)}
    exec(compile(program, "README.md", "exec"), names)
    assert names["trainer"].global_step > STEPS
    assert list((tmp_path / "run-1" / "tape").rglob("*-0")), "rounds were committed"
