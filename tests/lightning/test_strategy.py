"""What the strategy is told, what it says, and what it leaves in checkpoints and logs."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import NodeGone, RunJoined, RunWaited
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.sinks import JsonLines
from tests.lightning.nodes import QUIET, batches
from tests.offices import LEASE_SECONDS, SETTINGS, Vacancy

# Options


def test_options_come_from_the_program_then_from_the_environment(pl, monkeypatch):
    kind = pl.gm.GradientMailStrategy
    with pytest.raises(ConfigurationError, match="No mailbox was given"):
        kind()
    monkeypatch.setenv("GRADIENTMAIL_MAILBOX", "file:///there")
    monkeypatch.setenv("GRADIENTMAIL_SYNC_EVERY", "7")
    monkeypatch.setenv("GRADIENTMAIL_NODE", "berlin")
    monkeypatch.setenv("GRADIENTMAIL_FRAGMENTS", "1")
    told = kind()
    assert (told.mailbox, told.node, told.algorithm) == ("file:///there", "berlin", DiLoCo(sync_every=7, fragments=1))
    chosen = kind(mailbox="file:///here", algorithm=DiLoCo(), node="paris")
    assert (chosen.mailbox, chosen.node, chosen.algorithm) == ("file:///here", "paris", DiLoCo())


@pytest.mark.parametrize("told", ["argument", "environment"])
def test_one_named_node_can_close_all_rounds(lightning, told, tmp_path, monkeypatch):
    """As a store without a conditional create needs it: the run says so, and that node creates it."""
    monkeypatch.setenv("GRADIENTMAIL_SYNCER", "a" if told == "environment" else "b")
    options = {"syncer": "a"} if told == "argument" else {}
    algorithm = DiLoCo(sync_every=4, fragments=1)
    strategy = lightning.gm.GradientMailStrategy((tmp_path / "run").as_uri(), algorithm, node="a", **options)
    lightning.fit(lightning.Module(), strategy)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_bytes())
    assert (manifest["store"], manifest["closers"]) == ("none", ["a"])


@pytest.mark.parametrize(
    "wrong", [{"max_batch_size": 0}, {"tokens": 3}, {"evaluate": "both"}, {"epoch": "x"}, {"buffers": "sum"}]
)
def test_options_that_cannot_work_are_refused(lightning, wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        lightning.fit(lightning.Module(), lightning.Strategy(**wrong))


def test_strategies_can_be_chosen_by_name(pl, monkeypatch):
    monkeypatch.setenv("GRADIENTMAIL_MAILBOX", "file:///there")
    trainer = pl.pl.Trainer(strategy="gradientmail", **QUIET)
    assert type(trainer.strategy) is pl.gm.GradientMailStrategy
    assert trainer.strategy.mailbox == "file:///there"
    names = pl.pl.strategies.StrategyRegistry.available_strategies()
    assert {"gradientmail", "gradientmail_ddp", "gradientmail_fsdp2"} <= set(names)


def test_without_a_name_each_strategy_is_a_node_of_its_own(pl):
    kind = pl.gm.GradientMailStrategy
    assert kind(mailbox="file:///there").node != kind(mailbox="file:///there").node


# Data


def orders(pl, node, **options):
    seen = []

    def training_step(self, batch, batch_idx):
        seen.extend(batch[0][:, 0].tolist())
        return self.loss(batch[0])

    strategy = pl.Strategy(**options)
    strategy.node = node
    pl.pl.seed_everything(3)
    pl.fit(pl.Module(training_step=training_step), strategy, batches(shuffle=True))
    return seen


def test_nodes_seeded_alike_read_differently(pl):
    seen = {node: orders(pl, node) for node in "ab"}
    assert seen["a"] != seen["b"]
    assert sorted(seen["a"]) == sorted(seen["b"])
    assert orders(pl, "a") == seen["a"]


def test_that_can_be_switched_off(pl):
    assert orders(pl, "a", own_order=False) == orders(pl, "b", own_order=False)


def test_validation_data_stay_as_they_are(pl):
    loader = DataLoader(TensorDataset(torch.rand(8, 4)), batch_size=4, shuffle=True)
    used = []

    class Watch(pl.pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            used.append(trainer.val_dataloaders)

    pl.fit(pl.Module(), pl.Strategy(), callbacks=[Watch()], val_dataloaders=loader, num_sanity_val_steps=0)
    assert used == [loader]


# Checkpoints


def test_a_checkpoint_holds_plain_types_and_resumes(pl, tmp_path):
    strategy = pl.Strategy(commits={4: 1.0})
    trainer = pl.fit(pl.Module(), strategy)
    path = tmp_path / "half.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["callbacks"]["gradientmail"]
    assert state == {"node": "a", "global_step": 8, "rounds": 1}

    module = pl.Module()
    resumed = pl.Strategy()
    saved = torch.load(path, weights_only=True)["state_dict"]
    trainer = pl.fit(module, resumed, ckpt_path=path, max_epochs=2)
    assert trainer.global_step == 16
    joined = resumed.recorded.joined_with
    expected = torch.cat([saved["net.bias"], saved["net.weight"].view(-1)])
    assert torch.equal(torch.from_numpy(joined), expected)


def test_the_join_comes_after_a_late_restore_too(pl, tmp_path):
    first = pl.Module()
    trainer = pl.fit(first, pl.Strategy())
    trainer.save_checkpoint(tmp_path / "half.ckpt")

    class Late(pl.Strategy):
        restore_checkpoint_after_setup = True

    strategy = Late()
    pl.fit(pl.Module(), strategy, ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert strategy.recorded.joined_with[0] == first.net.bias.item()


def test_checkpoints_of_the_stock_strategy_resume(pl, tmp_path):
    module = pl.Module()
    trainer = pl.fit(module, "auto")
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    strategy = pl.Strategy()
    pl.fit(pl.Module(), strategy, ckpt_path=tmp_path / "plain.ckpt", max_epochs=2)
    assert len(strategy.recorded.samples) == 8


# Words and figures


def test_metrics_reach_progress_bar_and_logger(pl, tmp_path):
    logger = pl.pl.loggers.CSVLogger(tmp_path)
    bars = []

    class Watch(pl.pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            bars.append({name for name in trainer.progress_bar_metrics if "gradientmail" in name})

    strategy = pl.Strategy(commits={3: 1.0})
    trainer = pl.fit(pl.Module(), strategy, logger=logger, log_every_n_steps=4, callbacks=[Watch()])
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    expected = {"gradientmail/round": 1.0, "gradientmail/live_nodes": 2.0, "gradientmail/bytes_up": 5.0}
    assert logged == expected
    assert bars[-1] == {"gradientmail/round", "gradientmail/live_nodes"}
    written = Path(logger.log_dir, "metrics.csv").read_text()
    assert "gradientmail/round" in written


def test_no_logger_means_no_warning(pl, recwarn):
    pl.fit(pl.Module(), pl.Strategy(commits={3: 1.0}))
    assert not [warning for warning in recwarn if "gradientmail" in str(warning.message)]


def test_joining_and_waiting_are_announced(pl, caplog):
    strategy = pl.Strategy()
    with caplog.at_level(logging.INFO, logger=pl.name):
        strategy._announce(RunJoined(run="0123456789", node="a", step=3, rounds=2, live=("b",)))
        strategy._announce(RunWaited(reason="waiting for 1 more node"))
        strategy._announce(NodeGone(node="b", left=False))
    assert [record.message for record in caplog.records] == [
        "GradientMail: a joined run 01234567 at step 3 after 2 rounds, with b",
        "GradientMail: waiting for 1 more node",
    ]
    assert all(record.name == f"{pl.name}.gradientmail" for record in caplog.records)


def test_batch_norm_statistics_are_a_warning(pl, caplog):
    module = pl.Module()
    module.net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), module.net)
    with caplog.at_level(logging.WARNING, logger=pl.name):
        pl.fit(module, pl.Strategy(), limit_train_batches=1)
        pl.fit(pl.Module(), pl.Strategy(), limit_train_batches=1)
    told = [record.message for record in caplog.records if record.name.endswith("gradientmail")]
    assert len(told) == 1
    assert "2 buffers (such as net.0.running_mean) are not merged" in told[0]


def with_batch_norm(pl):
    module = pl.Module()
    module.net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), module.net)
    return module


def test_batch_norm_statistics_that_are_meant_to_be_local_are_no_warning(pl, caplog):
    with caplog.at_level(logging.WARNING, logger=pl.name):
        pl.fit(with_batch_norm(pl), pl.Strategy(buffers="local"), limit_train_batches=1)
        pl.fit(with_batch_norm(pl), pl.Strategy(buffers="mean"), limit_train_batches=1)
    assert not [record for record in caplog.records if record.name.endswith("gradientmail")]


def test_a_late_node_starts_from_the_runs_batch_norm_statistics(pl, tmp_path):
    def strategy(node):
        algorithm = DiLoCo(sync_every=4, fragments=2, delta_codec="F32")
        url = (tmp_path / "run").as_uri()
        return pl.gm.GradientMailStrategy(mailbox=url, algorithm=algorithm, node=node, buffers="mean")

    first = with_batch_norm(pl)
    pl.fit(first, strategy("a"))
    found = []

    class Watch(pl.pl.Callback):
        def on_train_start(self, trainer, pl_module):
            found.append(pl_module.net[0].running_mean.clone())

    pl.fit(with_batch_norm(pl), strategy("b"), callbacks=[Watch()], max_epochs=2)
    assert torch.equal(found[0], first.net[0].running_mean)
    assert found[0].abs().max() > 0.05


# Optimizers


def test_an_optimizer_without_hooks_is_believed(lightning):
    class Strange:
        """Looks like an optimizer to Lightning and derives from nothing."""

        def step(self, closure):
            return None

    strategy = lightning.Strategy()
    strategy._lightning_module = lightning.Module()
    strategy.optimizer_step(Strange(), lambda: None)
    assert strategy._stepped


def test_replaced_optimizers_are_watched_once(lightning):
    strategy = lightning.Strategy()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight])
    strategy.optimizers = [optimizer]
    strategy.optimizers = [optimizer]
    assert len(optimizer._optimizer_step_post_hooks) == 1
    strategy.optimizers = []
    assert not optimizer._optimizer_step_post_hooks


def test_a_rolled_back_node_forgets_its_optimizers_state(lightning):
    module = lightning.Module(make_optimizer=torch.optim.Adam)
    strategy = lightning.Strategy()
    found = []

    class Watch(lightning.pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 4:
                strategy.recorded.model.reset_optimizer()
                found.append(len(trainer.optimizers[0].state))

    trainer = lightning.fit(module, strategy, callbacks=[Watch()])
    assert found == [0]
    assert all(state["step"] == 3 for state in trainer.strategy.optimizers[0].state.values())


# Directories and what a session needs to go on


@pytest.mark.parametrize("own", [True, False])
def test_nodes_that_share_a_disk_keep_their_checkpoints_apart(pl, tmp_path, own):
    checkpoint = pl.pl.callbacks.ModelCheckpoint()
    strategy = pl.Strategy(own_directories=own)
    options = {"callbacks": [checkpoint], "enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = pl.fit(pl.Module(), strategy, **options)
    folder = tmp_path / "checkpoints" / "a" if own else tmp_path / "checkpoints"
    assert [path.parent for path in tmp_path.rglob("*.ckpt")] == [folder]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(pl.Module(), batches())
    assert {path.parent for path in tmp_path.rglob("*.ckpt")} == {folder}


def test_a_directory_that_somebody_chose_is_kept(pl, tmp_path):
    checkpoint = pl.pl.callbacks.ModelCheckpoint(tmp_path / "here")
    pl.fit(pl.Module(), pl.Strategy(), callbacks=[checkpoint], enable_checkpointing=True)
    assert [path.parent.name for path in tmp_path.rglob("*.ckpt")] == ["here"]


def test_a_session_goes_on_from_its_own_state_once(pl, tmp_path):
    class Save(pl.pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    pl.fit(pl.Module(), pl.Strategy(), callbacks=[Save()])
    strategy = pl.Strategy()
    trainer = pl.fit(pl.Module(), strategy, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert strategy.recorded.loaded == {"steps": 5}
    assert len(strategy.recorded.samples) == 3
    trainer.fit_loop.max_epochs = 2
    trainer.fit(pl.Module(), batches())
    assert strategy.sessions[1].loaded is None


def test_a_real_session_goes_on_where_the_checkpoint_was(pl, tmp_path, caplog):
    """The parameters that were trained since the last commit are kept, and so is the run's clock."""

    def strategy():
        algorithm = DiLoCo(sync_every=4, fragments=1, overlap_steps=0)
        return pl.gm.GradientMailStrategy(mailbox=(tmp_path / "run").as_uri(), algorithm=algorithm, node="a")

    class Break(pl.pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 5:
                trainer.save_checkpoint(tmp_path / "half.ckpt")
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pl.fit(pl.Module(), strategy(), callbacks=[Break()])
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    began = []

    class Watch(pl.pl.Callback):
        def on_train_start(self, trainer, pl_module):
            began.append((pl_module.net.bias.item(), trainer.strategy.progress()["global_step"]))

    with caplog.at_level(logging.INFO, logger=pl.name):
        trainer = pl.fit(pl.Module(), strategy(), callbacks=[Watch()], ckpt_path=tmp_path / "half.ckpt")
    assert began == [(saved["net.bias"].item(), 6)]
    assert trainer.strategy.progress()["global_step"] == 8
    assert any("a goes on in run" in record.message for record in caplog.records)


def test_a_node_of_role_either_closes_for_all_when_the_syncer_is_gone(lightning, tmp_path):
    with Vacancy(tmp_path / "run") as vacancy:

        class Wait(lightning.pl.Callback):
            def on_train_batch_end(self, trainer, *args):
                vacancy.wait(trainer.global_step)

        strategy = lightning.gm.GradientMailStrategy(
            (tmp_path / "run").as_uri(),
            SETTINGS,
            node="e",
            role="either",
            lease_timeout=LEASE_SECONDS,
            callbacks=[vacancy.heard],
        )
        lightning.fit(lightning.Module(), strategy, callbacks=[Wait()])
    assert vacancy.elections[0] is True and vacancy.closed_in_office >= 2


def test_a_role_comes_from_the_program_then_from_the_environment_and_a_syncer_is_no_trainer(lightning, monkeypatch):
    monkeypatch.setenv("GRADIENTMAIL_ROLE", "either")
    assert lightning.gm.GradientMailStrategy("file:///there").role == "either"
    strategy = lightning.gm.GradientMailStrategy("file:///there", role="learner")
    assert strategy._open_session(TorchModel(lightning.Module()))._role == "learner"
    with pytest.raises(ConfigurationError, match="gradientmail syncer URL"):
        lightning.gm.GradientMailStrategy("file:///there", role="syncer")
    with pytest.raises(ConfigurationError, match="role is 'boss'"):
        lightning.gm.GradientMailStrategy("file:///there", role="boss")


def test_every_event_goes_to_the_callbacks_that_were_given(lightning, tmp_path):
    sinks = [JsonLines(tmp_path / "events.jsonl")]
    strategy = lightning.gm.GradientMailStrategy(MemoryMailbox(), DiLoCo(sync_every=4, fragments=1), callbacks=sinks)
    lightning.fit(lightning.Module(), strategy)
    kinds = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {"RunCreated", "RoundCommitted", "FragmentAligned"} <= set(kinds) and kinds[-1] == "SessionEnded"
