"""Small Lightning programs to run a strategy in, under both names Lightning is installed by."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.tensors.model import Model
from tests.sessions import RecordingSession

NAMESPACES = {
    "lightning.pytorch": "gradientmail_lightning.lightning_pytorch",
    "pytorch_lightning": "gradientmail_lightning.pytorch_lightning",
}
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
}


def namespace(name: str) -> Any:
    """Lightning under ``name``: ``pl`` itself, the plugin's module as ``gm``, and the classes built on them."""
    pl = importlib.import_module(name)
    gm = importlib.import_module(NAMESPACES[name])
    found = SimpleNamespace(name=name, pl=pl, gm=gm)
    found.Module = _module_class(pl)
    found.Strategy = _recording_strategy(gm.GradientMailStrategy)
    found.fit = lambda module, strategy, loader=None, **options: _fit(found, module, strategy, loader, **options)
    return found


def batches(count: int = 8, size: int = 4, **options: Any) -> DataLoader[Any]:
    """A loader of ``count`` batches of ``size`` rows of three features and one target."""
    rows = torch.arange(count * size * 4, dtype=torch.float32).reshape(-1, 4) / (count * size * 4)
    return DataLoader(TensorDataset(rows), batch_size=size, **options)


def two_optimizers(pl: Any) -> Any:
    """A module in manual optimization that steps two optimizers in each batch, as a GAN does."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch[0]))
            optimizer.step()

    def two(parameters: Any) -> Any:
        weight, bias = parameters
        return [torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([bias])]

    module = pl.Module(make_optimizer=two, training_step=training_step)
    module.automatic_optimization = False
    return module


def _fit(found: Any, module: Any, strategy: Any, loader: Any, **options: Any) -> Any:
    fit_options = {
        name: options.pop(name) for name in ("ckpt_path", "val_dataloaders", "weights_only") if name in options
    }
    trainer = found.pl.Trainer(strategy=strategy, **{**QUIET, "max_epochs": 1, **options})
    trainer.fit(module, batches() if loader is None else loader, **fit_options)
    return trainer


def _module_class(pl: Any) -> Any:
    class Regression(pl.LightningModule):
        """One linear layer; ``hooks`` override any method, ``make_optimizer`` the optimizer."""

        def __init__(self, make_optimizer: Any = None, **overrides: Any) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)
            self.make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.01))
            for name, override in overrides.items():
                object.__setattr__(self, name, override.__get__(self))

        def loss(self, rows: torch.Tensor) -> torch.Tensor:
            return (self.net(rows[:, :3]) - rows[:, 3:]).square().mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch[0])

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch[0])

        def configure_optimizers(self) -> Any:
            return self.make_optimizer(self.parameters())

    return Regression


def _recording_strategy(base: Any) -> Any:
    class RecordingStrategy(base):
        """The real strategy with a session that only takes notes; ``sessions`` holds one for each fit."""

        def __init__(
            self,
            commits: dict[int, float] | None = None,
            fail_at: int | None = None,
            shares: dict[int, int] | None = None,
            start: int = 0,
            **options: Any,
        ) -> None:
            algorithm = DiLoCo(global_batch_size=shares[0] if shares else None)
            super().__init__(**{"mailbox": "memory://", "algorithm": algorithm, "node": "a", **options})
            self.sessions: list[RecordingSession] = []
            self.commits, self.fail_at, self.shares, self.start = commits, fail_at, shares, start

        def _open_session(self, model: Model) -> Any:
            session = RecordingSession(model, self.commits)
            session.fail_at, session.start, session.shares = self.fail_at, self.start, self.shares or {}
            self.sessions.append(session)
            return session

        @property
        def recorded(self) -> RecordingSession:
            """The only session there was."""
            assert len(self.sessions) == 1
            return self.sessions[0]

    return RecordingStrategy
