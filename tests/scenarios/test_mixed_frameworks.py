"""One run, three ways to train in it: the Hugging Face Trainer, Lightning, and a loop of one's own."""

import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

import gradientmail_core as gm
from gradientmail_core.events import Event, FragmentAligned
from gradientmail_hf import GradientMailCallback
from gradientmail_lightning import GradientMailStrategy
from tests.hf.nodes import llama, rows, trainer
from tests.lightning.nodes import QUIET

STEPS, NODES = 12, 3
SETTINGS = gm.DiLoCo(sync_every=4, fragments=2, overlap_steps=0, quorum_size=NODES, follow=False, delta_codec="F32")


class Wrapped(L.LightningModule):
    """A Llama below an attribute, as Lightning programs have it."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def in_lightning(model: torch.nn.Module, url: str) -> None:
    strategy = GradientMailStrategy(mailbox=url, algorithm=SETTINGS, node="lightning", min_nodes=NODES)
    quiet: dict[str, Any] = QUIET
    made = L.Trainer(strategy=strategy, max_steps=STEPS, max_epochs=-1, **quiet)
    made.fit(Wrapped(model), DataLoader(rows(), batch_size=4, shuffle=True))


def in_a_plain_loop(model: torch.nn.Module, url: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(DataLoader(rows(64), batch_size=5))
    with gm.Session(model, mailbox=url, algorithm=SETTINGS, node="plain", min_nodes=NODES) as session:
        for _ in range(STEPS):
            batch = next(loader)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step(batch["input_ids"].numel())


def in_the_trainer(model: torch.nn.Module, url: str, folder: Path, events: list[Event]) -> None:
    callback = GradientMailCallback(url, SETTINGS, node="hf", min_nodes=NODES, callbacks=[events.append])
    trainer(folder, callback, model, max_steps=STEPS).train()


def values(model: torch.nn.Module) -> dict[str, bytes]:
    """Every parameter's bytes."""
    return {name: tensor.detach().numpy().tobytes() for name, tensor in model.named_parameters()}


@pytest.mark.timeout(180)
def test_nodes_of_three_frameworks_end_on_the_same_committed_bytes(tmp_path):
    url = (tmp_path / "run").as_uri()
    models = {name: llama(seed) for seed, name in enumerate(("hf", "lightning", "plain", "committed"))}
    assert len({str(values(model)) for model in models.values()}) == 4
    others = [
        threading.Thread(target=work, args=(models[name], url), daemon=True)
        for name, work in (("lightning", in_lightning), ("plain", in_a_plain_loop))
    ]
    for thread in others:
        thread.start()
    events: list[Event] = []
    in_the_trainer(models["hf"], url, tmp_path / "hf", events)
    for thread in others:
        thread.join()
    assert gm.align(models["committed"], mailbox=url) == STEPS
    expected = values(models["committed"])
    assert {name for name, model in models.items() if values(model) == expected} == set(models)
    merged = [(event.participants, event.merged) for event in events if isinstance(event, FragmentAligned)]
    assert merged == [(NODES, True)] * (SETTINGS.fragments * STEPS // SETTINGS.sync_every)
