"""A trainer that joins late starts where the run is, and ends with it."""

import itertools
import math

import pytest
import torch
from torch.optim import lr_scheduler

from tests.lightning.nodes import batches, two_optimizers


def rates(pl, make_scheduler, interval="step", frequency=1, start=0, **options):
    """The learning rate of each step, with ``start`` steps of the run made by others."""
    seen = []

    def optimizers(parameters):
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        config = {"scheduler": make_scheduler(optimizer), "interval": interval, "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}

    class Watch(pl.pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    strategy = pl.Strategy(start=start, follow_run=options.pop("follow_run", True))
    trainer = pl.fit(
        pl.Module(make_optimizer=optimizers), strategy, callbacks=[Watch()], **{"max_epochs": 3, **options}
    )
    return seen, trainer


SCHEDULES = {
    "warmup": (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20)), "step", 1),
    "cosine": (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 24), "step", 1),
    "sometimes": (lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5), "step", 3),
    "epochs": (lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.1), "epoch", 1),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_go_on_where_the_run_is(pl, kind):
    whole, _ = rates(pl, *SCHEDULES[kind])
    late, trainer = rates(pl, *SCHEDULES[kind], start=8)
    assert late == pytest.approx(whole[8:])
    assert (trainer.global_step, trainer.current_epoch) == (24, 3)


def test_a_late_node_trains_for_what_is_left(pl):
    late, trainer = rates(pl, *SCHEDULES["warmup"], start=17, max_epochs=-1, max_steps=20)
    assert late == pytest.approx([0.85, 0.9, 0.95])
    assert trainer.global_step == 20


def test_a_run_that_is_over_is_left_at_once(pl):
    strategy = pl.Strategy(start=20)
    trainer = pl.fit(pl.Module(), strategy, max_epochs=-1, max_steps=20)
    assert trainer.global_step == 20
    assert strategy.recorded.names == ["join", "close"]


def test_following_can_be_switched_off(pl):
    whole, _ = rates(pl, *SCHEDULES["warmup"])
    own, trainer = rates(pl, *SCHEDULES["warmup"], start=8, follow_run=False)
    assert own == whole
    assert trainer.global_step == 24


def test_a_schedule_of_limited_length_reaches_the_end_of_training(pl):
    """13 steps into the second of three epochs of 8: two whole epochs are left, and so many steps of the schedule."""

    def cycle(optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=24)

    late, trainer = rates(pl, cycle, start=13)
    assert len(late) == 16
    assert trainer.current_epoch == 3
    whole, _ = rates(pl, cycle)
    assert late == pytest.approx(whole[8:])


def test_a_trainer_that_is_ahead_is_left_alone(pl, tmp_path):
    trainer = pl.fit(pl.Module(), pl.Strategy())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    strategy = pl.Strategy(start=3)
    trainer = pl.fit(pl.Module(), strategy, ckpt_path=tmp_path / "one.ckpt", max_epochs=2)
    assert trainer.global_step == 16
    assert len(strategy.recorded.samples) == 8


def test_a_checkpoint_follows_for_the_rest(pl, tmp_path):
    schedule = SCHEDULES["cosine"]
    whole, trainer = rates(pl, *schedule, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    whole, _ = rates(pl, *schedule)
    late, trainer = rates(pl, *schedule, start=16, ckpt_path=tmp_path / "one.ckpt")
    assert late == pytest.approx(whole[16:])
    assert trainer.global_step == 24


def test_a_late_node_counts_accumulated_batches_as_one_step(pl):
    late, trainer = rates(pl, *SCHEDULES["warmup"], start=4, accumulate_grad_batches=2)
    assert len(late) == 16
    assert late[::2] == pytest.approx([step / 20 for step in range(4, 12)])
    assert (trainer.global_step, trainer.current_epoch) == (12, 3)


def test_two_optimizers_count_two_steps(pl):
    strategy = pl.Strategy(start=5)
    trainer = pl.fit(two_optimizers(pl), strategy, max_epochs=-1, max_steps=16)
    assert trainer.global_step == 16
    assert len(strategy.recorded.samples) == 3


def test_endless_data_have_one_epoch(pl):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return ((torch.rand(4),) for _ in itertools.count())

    loader = torch.utils.data.DataLoader(Endless(), batch_size=4)
    strategy = pl.Strategy(start=5)
    trainer = pl.fit(pl.Module(), strategy, loader, max_epochs=-1, max_steps=8)
    assert trainer.num_training_batches == math.inf
    assert (trainer.global_step, trainer.current_epoch, len(strategy.recorded.samples)) == (8, 1, 3)


def test_loggers_count_the_runs_steps(pl, tmp_path):
    logger = pl.pl.loggers.CSVLogger(tmp_path)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.log("loss", loss)
        return loss

    strategy = pl.Strategy(start=10)
    pl.fit(
        pl.Module(training_step=training_step),
        strategy,
        batches(),
        logger=logger,
        log_every_n_steps=1,
        max_epochs=-1,
        max_steps=14,
    )
    logged = [line.split(",") for line in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().split()]
    column = logged[0].index("step")
    assert [int(row[column]) for row in logged[1:]] == [10, 11, 12, 13]
