"""When the session joins, steps and leaves, in every way Lightning can train."""

import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gradientmail_core.errors import ConfigurationError
from tests.lightning.nodes import batches, two_optimizers
from tests.sessions import LAST

EIGHT = [4] * 8


# Steps


def test_one_step_for_each_optimizer_step(pl):
    strategy = pl.Strategy()
    pl.fit(pl.Module(), strategy)
    assert strategy.recorded.names == ["join", "step", "close"]
    assert strategy.recorded.samples == EIGHT


@pytest.mark.parametrize(("accumulate", "expected"), [(2, [8] * 4), (3, [12, 12, 8]), (8, [32])])
def test_accumulated_batches_are_one_step_with_all_their_samples(pl, accumulate, expected):
    strategy = pl.Strategy()
    pl.fit(pl.Module(), strategy, accumulate_grad_batches=accumulate)
    assert strategy.recorded.samples == expected


def test_a_gan_in_manual_optimization_steps_once_a_batch(pl):
    strategy = pl.Strategy(commits={3: 1.0})
    trainer = pl.fit(two_optimizers(pl), strategy)
    assert strategy.recorded.samples == EIGHT
    assert trainer.global_step == 16


def test_raw_optimizers_are_seen(pl):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        if batch_idx % 2:
            optimizer.step()

    module = pl.Module(training_step=training_step)
    module.automatic_optimization = False
    strategy = pl.Strategy()
    trainer = pl.fit(module, strategy)
    assert strategy.recorded.samples == [8] * 4
    assert trainer.global_step == 0


def test_a_missing_loss_counts_as_lightning_counts_it(pl):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 else self.loss(batch[0])

    strategy = pl.Strategy()
    trainer = pl.fit(pl.Module(training_step=training_step), strategy)
    assert len(strategy.recorded.samples) == trainer.global_step == 8


def test_lbfgs_evaluates_often_and_steps_once(pl):
    strategy = pl.Strategy()
    module = pl.Module(make_optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=4))
    pl.fit(module, strategy)
    assert strategy.recorded.samples == EIGHT


class SkippingScaler(torch.amp.GradScaler):
    """Finds overflow in chosen steps, as fp16 training does; ``enabled=False`` scaling needs no GPU."""

    def __init__(self, skip):
        super().__init__("cpu", init_scale=1.0, growth_interval=10**6)
        self._skip, self._asked = skip, 0

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        self._asked += 1
        if self._asked in self._skip:
            return None
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)


def test_a_step_the_scaler_skipped_is_not_counted(pl):
    precision = pl.pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=SkippingScaler({2, 5}))
    strategy = pl.Strategy()
    trainer = pl.fit(pl.Module(), strategy, plugins=[precision])
    assert trainer.global_step == 8
    assert strategy.recorded.samples == [4, 8, 4, 8, 4, 4]


def test_a_fused_optimizer_that_skips_by_itself_is_not_counted(lightning):
    strategy = lightning.Strategy()
    strategy._saw_step(type("Fused", (), {"found_inf": torch.tensor(1.0)})(), (), {})
    assert not strategy._stepped
    strategy._saw_step(type("Fused", (), {"found_inf": torch.tensor(0.0)})(), (), {})
    assert strategy._stepped


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_other_precisions(pl, precision):
    strategy = pl.Strategy(commits={8: 0.5})
    module = pl.Module()
    pl.fit(module, strategy, precision=precision, gradient_clip_val=0.1)
    assert strategy.recorded.samples == EIGHT
    assert torch.all(module.net.weight == 0.5)
    expected = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
    assert module.net.weight.dtype == expected.get(precision, torch.float32)


def test_tokens_are_counted_where_the_batch_names_them(pl):
    rows = [{"input_ids": torch.zeros(2, length, dtype=torch.long)} for length in (5, 3, 4)]

    def training_step(self, batch, batch_idx):
        ids = batch.pop("input_ids")
        return self.net(ids[:, :3].float()).mean()

    strategy = pl.Strategy()
    pl.fit(pl.Module(training_step=training_step), strategy, DataLoader(rows, batch_size=None))
    assert strategy.recorded.samples == [10, 6, 8]


def test_tokens_can_be_counted_by_the_user(pl):
    strategy = pl.Strategy(tokens=lambda batch: batch[0].numel())
    pl.fit(pl.Module(), strategy)
    assert strategy.recorded.samples == [16] * 8


def test_a_step_that_fetches_its_own_batches(pl):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch[0])

    strategy = pl.Strategy()
    pl.fit(pl.Module(training_step=training_step), strategy)
    assert strategy.recorded.samples == EIGHT


# What the others see


def test_a_commit_is_seen_by_callbacks_and_validation_of_the_same_batch(pl):
    seen = []

    class Watch(pl.pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(("batch", pl_module.net.bias.item()))

        def on_validation_start(self, trainer, pl_module):
            seen.append(("validation", pl_module.net.bias.item()))

    strategy = pl.Strategy(commits={2: 7.0})
    pl.fit(
        pl.Module(),
        strategy,
        callbacks=[Watch()],
        val_check_interval=2,
        limit_train_batches=2,
        num_sanity_val_steps=0,
        val_dataloaders=batches(1),
    )
    assert seen[1:] == [("batch", 7.0), ("validation", 7.0)]


def test_the_step_is_in_what_the_session_reads(pl):
    """The optimizer's step is done, once, when the session looks at the parameters."""
    module, twin = pl.Module(), pl.Module()
    twin.load_state_dict(module.state_dict())
    strategy = pl.Strategy(commits={1: 0.0})
    pl.fit(module, strategy, limit_train_batches=1)
    optimizer = twin.configure_optimizers()
    twin.training_step(next(iter(batches())), 0).backward()
    optimizer.step()
    expected = np.concatenate([twin.net.bias.detach().numpy(), twin.net.weight.detach().numpy()[0]])
    assert np.array_equal(strategy.recorded.before_commit[0], expected)


def test_a_commit_leaves_optimizer_state_in_place(pl):
    module = pl.Module(make_optimizer=torch.optim.Adam)
    strategy = pl.Strategy(commits={4: 0.5})
    trainer = pl.fit(module, strategy)
    state = trainer.strategy.optimizers[0].state
    assert {id(parameter) for parameter in module.parameters()} == {id(key) for key in state}
    assert all(entry["step"] == 8 for entry in state.values())


def test_the_session_is_over_when_the_users_callbacks_end(pl):
    strategy = pl.Strategy()
    seen = []

    class Watch(pl.pl.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(list(strategy.recorded.names))

        def on_train_end(self, trainer, pl_module):
            seen.append(list(strategy.recorded.names))

    pl.fit(pl.Module(), strategy, callbacks=[Watch()])
    assert seen == [["join"], ["join", "step", "close"]]


def test_the_sanity_check_comes_before_the_join(pl):
    strategy = pl.Strategy()
    seen = []

    def validation_step(self, batch, batch_idx):
        seen.append(len(strategy.sessions))

    pl.fit(pl.Module(validation_step=validation_step), strategy, num_sanity_val_steps=1, val_dataloaders=batches(1))
    assert seen == [0, 1]


@pytest.mark.parametrize("average", ["swa", "ema"])
def test_an_average_of_weights_outlives_the_last_commit(pl, average):
    """The session's last word comes before the average is put in the model's place, not after."""
    if average == "swa":
        callback = pl.pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-9, swa_epoch_start=1, device="cpu")
    else:
        callback = pl.pl.callbacks.EMAWeightAveraging(decay=0.5)
    module = pl.Module()
    strategy = pl.Strategy(commits={7: 2.0, 15: 2.0, 23: 2.0, LAST: 9.0})
    pl.fit(module, strategy, callbacks=[callback], max_epochs=3)
    assert strategy.recorded.names == ["join", "step", "close"]
    assert 0.5 < module.net.bias.item() < 3.0


def test_the_last_epoch_of_an_average_only_measures_batch_norm(pl):
    """SWA runs one more epoch for the average's statistics, in which Lightning steps once, without gradients."""
    module = pl.Module()
    module.net = nn.Sequential(nn.BatchNorm1d(3), module.net)
    callback = pl.pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-9, swa_epoch_start=1, device="cpu")
    strategy = pl.Strategy(commits={LAST: 9.0}, buffers="mean")
    pl.fit(module, strategy, callbacks=[callback], max_epochs=3)
    assert strategy.recorded.names == ["join", "step", "close"]
    assert len(strategy.recorded.samples) == 24
    assert module.net[1].bias.item() < 3.0
    assert 0.1 < module.net[0].running_mean.abs().max() < 3.0


# No session


NOTHING = [{"fast_dev_run": True}, {"max_steps": 0}, {"max_epochs": 0}, {"limit_train_batches": 0}]


@pytest.mark.parametrize("options", NOTHING, ids=str)
def test_nothing_is_joined_where_nothing_is_trained(pl, options):
    strategy = pl.Strategy()
    pl.fit(pl.Module(), strategy, **options)
    assert strategy.sessions == []


def test_evaluation_joins_nothing(pl):
    strategy = pl.Strategy()
    trainer = pl.pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, barebones=True)
    trainer.validate(pl.Module(), batches(2))
    module = pl.Module(predict_step=lambda self, batch: self.net(batch[0][:, :3]))
    trainer.predict(module, batches(2))
    assert strategy.sessions == []


def test_barebones_trains_in_the_run(pl):
    strategy = pl.Strategy(commits={2: 1.0})
    trainer = pl.pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, barebones=True, max_epochs=1)
    trainer.fit(pl.Module(), batches())
    assert strategy.recorded.samples == EIGHT


# Ends


def test_a_second_fit_is_a_second_session(pl):
    strategy = pl.Strategy()
    module = pl.Module()
    trainer = pl.fit(module, strategy)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches())
    assert [session.samples for session in strategy.sessions] == [EIGHT, EIGHT]
    assert sum(type(callback).__name__ == "Hooks" for callback in trainer.callbacks) == 1


def failing(exception):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise exception
        return self.loss(batch[0])

    return training_step


def test_an_exception_aborts(pl):
    strategy = pl.Strategy()
    with pytest.raises(ZeroDivisionError):
        pl.fit(pl.Module(training_step=failing(ZeroDivisionError("oh"))), strategy)
    assert strategy.recorded.calls[-1] == ("abort", "ZeroDivisionError: oh")
    assert strategy.recorded.names == ["join", "step", "abort"]


def test_an_exception_in_a_callback_that_comes_later_aborts(pl):
    class Broken(pl.pl.Callback):
        def on_train_batch_end(self, *args):
            raise ZeroDivisionError("oh")

        def on_exception(self, *args):
            raise ValueError("again")

    strategy = pl.Strategy()
    with pytest.raises(ValueError, match="again"):
        pl.fit(pl.Module(), strategy, callbacks=[Broken()])
    assert strategy.recorded.names == ["join", "step", "abort"]


def test_control_c_aborts_and_is_no_success(pl):
    before = signal.getsignal(signal.SIGINT)
    strategy = pl.Strategy()
    try:
        with pytest.raises(SystemExit) as ended:
            pl.fit(pl.Module(training_step=failing(KeyboardInterrupt())), strategy)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code
    assert strategy.recorded.calls[-1] == ("abort", "KeyboardInterrupt")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM")
def test_a_sigterm_leaves_at_the_end_of_the_batch_and_is_no_success(pl):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            signal.raise_signal(signal.SIGTERM)
        return self.loss(batch[0])

    strategy = pl.Strategy()
    with pytest.raises(SystemExit) as ended:
        pl.fit(pl.Module(training_step=training_step), strategy)
    assert strategy.recorded.names == ["join", "step", "abort"]
    assert strategy.recorded.samples == [4] * 2
    assert ended.value.code == 143


def test_a_failed_session_ends_the_training(pl):
    strategy = pl.Strategy(fail_at=3)
    with pytest.raises(RuntimeError, match="the store is gone"):
        pl.fit(pl.Module(), strategy)
    assert strategy.recorded.calls[-1] == ("abort", "RuntimeError: the store is gone")


def test_a_session_that_cannot_even_abort_hides_nothing(pl):
    strategy = pl.Strategy()
    module = pl.Module(training_step=failing(ZeroDivisionError("oh")))

    class Broken(pl.pl.Callback):
        def on_train_start(self, trainer, pl_module):
            strategy.recorded.abort = failing_abort

    def failing_abort(reason):
        raise OSError("no network")

    with pytest.raises(ZeroDivisionError):
        pl.fit(module, strategy, callbacks=[Broken()])


# Parameters


def test_what_becomes_trainable_later_is_refused(pl):
    class Unfreeze(pl.pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.net.bias.requires_grad_(trainer.current_epoch == 1)

    module = pl.Module()
    module.net.bias.requires_grad_(False)
    strategy = pl.Strategy()
    with pytest.raises(ConfigurationError, match="bias became trainable after the run was joined"):
        pl.fit(module, strategy, callbacks=[Unfreeze()], max_epochs=2)
    assert len(strategy.recorded.samples) == 8


def test_a_model_with_nothing_to_train_is_refused(pl):
    module = pl.Module(training_step=lambda self, batch, batch_idx: torch.zeros((), requires_grad=True))
    module.net.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="no trainable parameters"):
        pl.fit(module, pl.Strategy())


def test_names_do_not_depend_on_compilation(pl):
    schemas = []
    for wrap in (lambda net: net, lambda net: torch.compile(net, backend="eager")):
        module = pl.Module()
        module.net = wrap(nn.Linear(3, 1))
        strategy = pl.Strategy(commits={1: 2.0})
        pl.fit(module, strategy, limit_train_batches=1)
        schemas.append(strategy.recorded.model.schema)
        assert module.net.bias.item() == 2.0
    assert schemas[0] == schemas[1]
    assert [tensor.name for tensor in schemas[0].tensors] == ["bias", "weight"]


def test_a_compiled_module_trains(pl):
    strategy = pl.Strategy(commits={1: 2.0})
    module = pl.Module()
    pl.fit(torch.compile(module, backend="eager"), strategy, limit_train_batches=1)
    assert module.net.bias.item() == 2.0
    assert [tensor.name for tensor in strategy.recorded.model.schema.tensors] == ["bias", "weight"]


def test_tied_weights_stay_tied(pl):
    module = pl.Module()
    module.head = nn.Linear(3, 1)
    module.head.weight = module.net.weight
    strategy = pl.Strategy(commits={8: 2.0})
    pl.fit(module, strategy)
    names = [tensor.name for tensor in strategy.recorded.model.schema.tensors]
    assert names == ["head.bias", "head.weight", "net.bias"]
    assert module.head.weight is module.net.weight
    assert torch.all(module.net.weight == 2.0)
