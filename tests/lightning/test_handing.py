"""A node that is killed and started elsewhere, with an empty folder, goes on with all it had.

Its first life is a process of its own, ended by SIGKILL as soon as a hand-off lies in the mailbox. Its second is
compared, bit for bit, with a node that never stopped.
"""

from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import HandedOff, HandoffSkipped, RunResumed, StateOmitted
from tests.handing import ALONE, Handover, await_the_end, killed
from tests.lightning.nodes import batches, namespace

EVERY, EPOCHS, BATCHES = 6, 3, 8


def module_for(pl: Any, seed: int, read: list[Any]) -> Any:
    """A model with dropout, Adam and a schedule; ``read`` notes every batch."""
    torch.manual_seed(seed)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        read.append(batch[0].clone())
        return (self.net(batch[0][:, :3]) - batch[0][:, 3:]).square().mean()

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]

    module = pl.Module(training_step=training_step, configure_optimizers=configure_optimizers)
    module.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return module


def train(pl: Any, folder: Path, module: Any, loader: Any = None, trainer: Any = None, **options: Any) -> Any:
    """Train to the end; what the program's seed draws differs from process to process."""
    settings: dict[str, Any] = {
        "node": "a", "buffers": "local", "handoff_every": EVERY, "algorithm": ALONE, "callbacks": (),
    }  # fmt: skip
    strategy = pl.gm.GradientMailStrategy((folder / "run").as_uri(), **{**settings, **options})
    data = batches(BATCHES, shuffle=True) if loader is None else loader
    pl.fit(module, strategy, data, **{"max_epochs": EPOCHS, **(trainer or {})})
    return strategy


def first_life(folder: str) -> None:
    """Train until the first hand-off is in the mailbox, say so, and wait to be killed."""
    pl, handover = namespace("lightning.pytorch"), Handover()

    class Wait(pl.pl.Callback):  # type: ignore[misc,name-defined]  # of whichever namespace
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step > EVERY:
                handover.wait()
                await_the_end()

    pl.pl.seed_everything(1, verbose=False)
    train(pl, Path(folder), module_for(pl, 0, []), callbacks=[handover.heard], trainer={"callbacks": [Wait()]})


def test_killed_and_started_elsewhere_with_an_empty_folder_a_node_ends_on_the_bits_of_one_that_never_stopped(
    lightning, tmp_path
):
    program = f"from tests.lightning.test_handing import first_life; first_life({str(tmp_path / 'broken')!r})"
    whole: list[Any] = []
    with killed(program):
        lightning.pl.seed_everything(1, verbose=False)
        straight = module_for(lightning, 0, whole)
        train(lightning, tmp_path / "whole", straight)

    rest, events = list[Any](), list[Any]()
    lightning.pl.seed_everything(1, verbose=False)
    again = module_for(lightning, 99, rest)
    strategy = train(lightning, tmp_path / "broken", again, callbacks=[events.append])
    assert [event.step for event in events if isinstance(event, RunResumed)] == [EVERY]
    assert len(rest) == len(whole) - EVERY
    assert all(torch.equal(one, other) for one, other in zip(rest, whole[EVERY:], strict=True)), "its place in the data"
    for (name, one), other in zip(straight.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert again.trainer.global_step == straight.trainer.global_step == EPOCHS * BATCHES
    assert again.trainer.lr_scheduler_configs[0].scheduler.last_epoch == EPOCHS * BATCHES
    assert not [event for event in events if isinstance(event, StateOmitted)]

    train(lightning, tmp_path / "broken", again, trainer={"max_epochs": EPOCHS + 1})
    assert len(rest) == len(whole) - EVERY + BATCHES, "a new process that has ended its epochs trains what is new"
    assert strategy.session is None


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.rand(16, 1, 4))


class Whole(TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.rand(8, 1, 4))


@pytest.mark.parametrize(
    ("loader", "options", "omitted"),
    [
        (lambda: DataLoader(Streamed(), batch_size=4), {}, {"the place in the data": "IterableDataset"}),
        (lambda: DataLoader(Whole(), batch_size=None), {}, {"the place in the data": "batch"}),
        (lambda: batches(8, shuffle=True), {"own_order": False}, {"the order of the data": "own_order"}),
        (lambda: batches(8, shuffle=True), {"algorithm": replace(ALONE, global_batch_size=4)}, {}),
    ],
    ids=["stream", "whole batches", "stock order", "share"],
)  # fmt: skip
def test_what_cannot_be_handed_off_is_said(lightning, tmp_path, loader, options, omitted):
    told: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        rows = batch[0].reshape(-1, 4)
        return self.loss(rows)

    module = lightning.Module(training_step=training_step)
    options = {"handoff_every": 2, **options, "callbacks": [told.append]}
    train(lightning, tmp_path, module, loader(), options.pop("trainer", {"max_epochs": 1}), **options)
    found = {event.part: event.reason for event in told if isinstance(event, StateOmitted)}
    assert found.keys() == omitted.keys()
    assert all(word in found[part] for part, word in omitted.items())


def test_a_callback_with_more_than_plain_state_stays_behind_alone(lightning, tmp_path):
    class Odd(lightning.pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

    told: list[Any] = []
    options = {"callbacks": [Odd()], "max_epochs": 1}
    train(lightning, tmp_path, lightning.Module(), trainer=options, callbacks=[told.append])
    found = [event for event in told if isinstance(event, StateOmitted)]
    assert [event.part.rsplit(".")[-1] for event in found] == ["Odd"] and "is a set" in found[0].reason
    assert [event for event in told if isinstance(event, HandedOff)]


def test_a_checkpoint_that_is_named_comes_before_a_hand_off(lightning, tmp_path):
    read: list[Any] = []

    class Save(lightning.pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "three.ckpt")

    train(lightning, tmp_path, module_for(lightning, 0, read), trainer={"max_epochs": 1, "callbacks": [Save()]})
    rest: list[Any] = []
    train(
        lightning,
        tmp_path,
        module_for(lightning, 0, rest),
        trainer={"max_epochs": 1, "ckpt_path": tmp_path / "three.ckpt"},
    )
    assert len(rest) == BATCHES - 3


@pytest.mark.parametrize("has_older", [False, True])
def test_a_damaged_one_is_told_once_and_names_what_happens_instead(lightning, tmp_path, has_older):
    train(lightning, tmp_path, lightning.Module(), trainer={"max_epochs": 1})
    folder = next((tmp_path / "run" / "handoff" / "a").iterdir())
    folder = folder.rename(folder.with_name("1".zfill(10) + folder.name[10:]))
    if has_older:
        copytree(folder, folder.with_name("0" * 10 + folder.name[10:]))
    part = folder / "0000"
    part.write_bytes(part.read_bytes()[:-1])
    told: list[Any] = []
    train(lightning, tmp_path, lightning.Module(), trainer={"max_epochs": 2}, callbacks=[told.append])
    skipped = [event for event in told if isinstance(event, HandoffSkipped)]
    assert [event.name for event in skipped] == [f"handoff/a/{folder.name}"]
    assert ("before it" if has_older else "newest commits") in str(skipped[0])
    assert bool([event for event in told if isinstance(event, RunResumed)]) is has_older


def test_a_hand_off_needs_a_name_and_a_whole_model(pl):
    kinds, url = pl.gm, "file:///there"
    with pytest.raises(ConfigurationError, match="node's name"):
        kinds.GradientMailStrategy(url, handoff_every=5)
    with pytest.raises(ConfigurationError, match="handoff_every is 0"):
        kinds.GradientMailStrategy(url, handoff_every=0, node="a")
    with pytest.raises(ConfigurationError, match="in parts"):
        kinds.GradientMailModelParallelStrategy(url, handoff_every=5, node="a")
