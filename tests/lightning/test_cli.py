"""Lightning's command line builds a strategy from plain arguments, and trains with it."""

import importlib
from pathlib import Path

import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from tests.lightning.nodes import NAMESPACES, batches

QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


def command_line(pl, *arguments, run=True):
    """Lightning's command line for a small model."""
    cli = importlib.import_module(f"{pl.name}.cli")

    class Regression(pl.Module):
        def __init__(self) -> None:
            super().__init__()

        def train_dataloader(self):
            return batches()

        val_dataloader = train_dataloader

    return cli.LightningCLI(Regression, run=run, save_config_callback=None, args=[*arguments, *QUIET])


def test_a_class_and_its_plain_arguments(pl, tmp_path: Path):
    url = (tmp_path / "run").as_uri()
    init = "--trainer.strategy.init_args"
    cli = command_line(
        pl,
        "fit",
        "--trainer.max_epochs=1",
        f"--trainer.strategy={NAMESPACES[pl.name]}.GradientMailStrategy",
        f"{init}.mailbox={url}",
        f"{init}.node=berlin",
        f"{init}.evaluate=global",
        f"{init}.max_batch_size=64",
        f"{init}.algorithm.sync_every=4",
        f"{init}.algorithm.fragments=2",
    )
    strategy = cli.trainer.strategy
    assert type(strategy) is pl.gm.GradientMailStrategy
    assert (strategy.mailbox, strategy.node, strategy.algorithm) == (url, "berlin", DiLoCo(sync_every=4, fragments=2))
    assert list((tmp_path / "run" / "tape").rglob("*-0")), "rounds were committed"


@pytest.mark.parametrize("kind", ["gradientmail", "gradientmail_ddp", "gradientmail_fsdp2"])
def test_a_name_and_the_environment(pl, kind, monkeypatch):
    monkeypatch.setenv("GRADIENTMAIL_MAILBOX", "file:///there")
    monkeypatch.setenv("GRADIENTMAIL_SYNC_EVERY", "30")
    cli = command_line(pl, f"--trainer.strategy={kind}", run=False)
    assert cli.trainer.strategy.strategy_name == kind
    assert cli.trainer.strategy.algorithm.sync_every == 30
