"""A trainer that joins late starts where the run is, and ends with it."""

import logging

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_hf import GradientMailCallback
from gradientmail_hf.following import Place, place_at
from tests.hf.nodes import RecordingCallback, Sized, Stream, llama, rows, trainer

EPOCHS = {"max_steps": -1, "num_train_epochs": 3}
"""Three of eight steps each."""


class Rates(TrainerCallback):
    """Notes each step's number and learning rate, and the steps after which epochs end."""

    def __init__(self):
        self.rates, self.epochs = {}, []

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.rates[state.global_step] = optimizer.param_groups[0]["lr"]

    def on_epoch_end(self, args, state, control, **kwargs):
        self.epochs.append((state.global_step, state.epoch))


def late(folder, start=0, resume=None, shares=None, **options):
    """A training that joins when others have made ``start`` steps; the trainer, what was noted, and the callback."""
    own = {name: options.pop(name) for name in ("follow_run",) if name in options}
    callback = RecordingCallback(start=start, shares=shares, **own)
    noted = Rates()
    made = trainer(folder, [callback, noted], **options)
    made.train(resume_from_checkpoint=resume)
    return made, noted, callback


def after(noted, start):
    return {step: rate for step, rate in noted.rates.items() if step >= start}


def test_schedule_epochs_and_data_go_on_where_the_run_is(tmp_path):
    """As if the node had been there all the time; warmup and decay, and a start in the middle of an epoch."""
    options = {**EPOCHS, "warmup_steps": 6, "lr_scheduler_type": "cosine"}
    whole, expected, _ = late(tmp_path, **options)
    made, noted, callback = late(tmp_path, 11, logging_strategy="steps", logging_steps=1, **options)
    assert made.state.global_step == 24
    assert noted.rates == after(expected, 11)
    assert noted.epochs == expected.epochs[1:] == [(16, 2.0), (24, 3.0)]
    assert made.read == whole.read[11:]
    assert len(callback.recorded.samples) == 13
    first, last = made.state.log_history[0], made.state.log_history[-1]
    assert (first["step"], first["epoch"]) == (12, 1.5)
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert first["loss"] > 2.5 and last["train_loss"] == pytest.approx(sum(losses) / 13, rel=1e-3)


def test_accumulated_batches_are_one_step_and_a_users_schedule_follows(tmp_path):
    def optimizers(model):
        optimizer = torch.optim.AdamW(model.parameters())
        return optimizer, lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12)

    def train(start):
        model = llama()
        options = {"gradient_accumulation_steps": 3, "model": model, "optimizers": optimizers(model)}
        return late(tmp_path, start, **EPOCHS, **options, data=rows(40))

    whole, expected, _ = train(0)
    made, noted, _ = train(5)
    assert noted.rates == after(expected, 5)
    assert made.state.global_step == 12
    assert made.read == whole.read[5 * 3 - 2 :], "the first epoch's last step has one batch, not three"


def test_a_schedule_that_follows_a_metric_stays_the_nodes_own(tmp_path):
    made, noted, _ = late(
        tmp_path, 5, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch", eval_dataset=rows(4)
    )
    assert noted.rates == dict.fromkeys(range(5, 8), 1e-2)
    assert made.state.global_step == 8


@pytest.mark.parametrize("start", [8, 11])
def test_a_run_that_is_over_is_left_at_once(tmp_path, start, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    made, noted, callback = late(tmp_path, start, eval_strategy="epoch", eval_dataset=rows(4))
    assert callback.recorded.names == ["join", "close"]
    assert (made.read, noted.rates, made.state.global_step) == ([], {}, start)
    assert f"the run is at step {start}, and this trainer ends at step 8: nothing is left to train" in caplog.text


def test_following_can_be_switched_off(tmp_path):
    _, noted, callback = late(tmp_path, 5, follow_run=False)
    assert list(noted.rates) == list(range(8))
    assert len(callback.recorded.samples) == 8


@pytest.mark.parametrize(("start", "first"), [(3, 4), (6, 6)])
def test_a_checkpoint_follows_for_the_rest_and_is_never_moved_back(tmp_path, start, first):
    """``start`` is the run's step when the node that stopped after four comes back."""
    options = {**EPOCHS, "warmup_steps": 6}
    whole, expected, _ = late(tmp_path, save_strategy="steps", save_steps=4, save_total_limit=20, **options)
    made, noted, _ = late(tmp_path, start, resume=str(tmp_path / "checkpoint-4"), **options)
    assert noted.rates == after(expected, first)
    assert made.read == whole.read[first:]
    assert made.state.global_step == 24


def test_a_late_node_that_resumes_reads_on_where_it_stood(tmp_path):
    options = {**EPOCHS, "shares": {0: 6}}
    whole, _, _ = late(tmp_path / "whole", 11, **options)
    late(tmp_path, 11, save_strategy="steps", save_steps=14, **options)
    again, _, _ = late(tmp_path, 14, resume=str(tmp_path / "checkpoint-14"), **options)
    assert again.read == whole.read[3:]


def test_streamed_data_are_read_from_their_beginning(tmp_path):
    made, noted, _ = late(tmp_path, 5, data=Stream())
    assert list(noted.rates) == [5, 6, 7]
    assert made.read == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("loader", "place"),
    [
        (DataLoader(rows(40), batch_size=4), Place(1, 6)),
        (DataLoader(rows(5), batch_size=None), Place(2, 0)),
        (DataLoader(Sized(40), batch_size=4), Place(1, 0)),
        ([1] * 10, Place(1, 0)),
        (DataLoader(Stream(), batch_size=4), None),
    ],
    ids=["map", "batches of the dataset", "stream with a length", "list", "stream"],
)
def test_only_indices_are_skipped(loader, place):
    """After eight steps of two batches each."""
    assert place_at(loader, 8, 2) == place


def test_two_real_trainers_end_with_the_same_step(tmp_path):
    """The second joins a run of eight steps that goes on to twelve."""
    store, settings = MemoryMailbox(), DiLoCo(sync_every=2, fragments=1, overlap_steps=0, follow=False)
    for node, steps in {"a": 8, "b": 12}.items():
        callback = GradientMailCallback(store, settings, node=node, callbacks=[])
        made = trainer(tmp_path / node, callback, max_steps=steps)
        made.train()
        assert made.state.global_step == steps
    assert len(made.read) == 4
    assert made.state.log_history[-1]["gradientmail/global_step"] == 12
