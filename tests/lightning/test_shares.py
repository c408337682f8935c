"""Batches follow the node's share while it trains, and all that hangs on the number of batches stays as it was."""

import logging

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from tests.lightning.nodes import QUIET, batches

ROWS = 48


def rows(count=ROWS):
    """Rows of three features and their own number."""
    return torch.cat([torch.rand(count, 3), torch.arange(count)[:, None]], dim=1)


class Plain(IterableDataset):
    def __init__(self):
        self.rows = rows()

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter((row,) for row in (self.rows[worker.id :: worker.num_workers] if worker else self.rows))


class Sized(Plain):
    def __len__(self):
        return ROWS


DATASETS = {"map": lambda: TensorDataset(rows()), "iterable": Plain, "sized": Sized}


def watching(pl, **overrides):
    """A module that notes the rows of each training batch."""
    seen = []

    def training_step(self, batch, batch_idx):
        seen.append([int(number) for number in batch[0][:, 3]])
        return self.loss(batch[0] / ROWS)

    return pl.Module(training_step=training_step, **overrides), seen


def sizes(seen):
    return [len(batch) for batch in seen]


@pytest.mark.parametrize("later", [2, 8])
@pytest.mark.parametrize("data", DATASETS)
def test_batches_follow_the_share(pl, data, later):
    module, seen = watching(pl)
    strategy = pl.Strategy(shares={0: 4, 5: later})
    trainer = pl.fit(module, strategy, DataLoader(DATASETS[data](), batch_size=4), max_epochs=2)
    ahead = 1 if data == "iterable" else 0
    expected = [4] * (5 + ahead)
    if data == "iterable":
        assert sizes(seen)[:8] == [*expected, later, later]
        assert sum(sizes(seen)) == 2 * ROWS
    else:
        assert sizes(seen) == expected + [later] * 19
        assert trainer.global_step == 24
        first = [number for batch in seen for number in batch][:ROWS]
        assert first == list(range(ROWS))
    assert strategy.recorded.samples == sizes(seen)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("later", [2, 8])
@pytest.mark.parametrize("data", DATASETS)
def test_an_epoch_can_be_one_pass_over_the_samples(lightning, data, later, workers):
    """Its batches come to what they come to; validation and the last accumulated step are at its end all the same."""
    ends, validated = [], []

    class Count(lightning.pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            validated.append(len(seen))

        def on_train_epoch_end(self, trainer, pl_module):
            ends.append(len(seen))

    module, seen = watching(lightning)
    strategy = lightning.Strategy(shares={0: 12, 1: 3 * later}, epoch="samples")
    trainer = lightning.fit(
        module,
        strategy,
        DataLoader(DATASETS[data](), batch_size=4, num_workers=workers),
        max_epochs=2,
        accumulate_grad_batches=3,
        callbacks=[Count()],
        val_dataloaders=batches(1),
        num_sanity_val_steps=0,
    )
    for epoch in (seen[: ends[0]], seen[ends[0] :]):
        assert sorted(number for batch in epoch for number in batch) == list(range(ROWS))
    assert set(sizes(seen)) >= {4, later}
    assert validated == ends
    steps = -(-ends[0] // 3) - (ends[0] - ends[1]) // 3
    assert len(strategy.recorded.samples) == trainer.global_step == steps


def test_the_last_samples_of_a_pass_can_be_dropped(lightning):
    module, seen = watching(lightning)
    loader = DataLoader(TensorDataset(rows()), batch_size=4, drop_last=True)
    lightning.fit(module, lightning.Strategy(shares={0: 5}, epoch="samples"), loader, max_epochs=2)
    assert seen == [list(range(start, start + 5)) for start in range(0, 45, 5)] * 2


@pytest.mark.parametrize("later", [2, 8])
@pytest.mark.parametrize("data", DATASETS)
def test_workers_follow_the_share_with_the_batches_they_have_prefetched(lightning, data, later):
    module, seen = watching(lightning)
    strategy = lightning.Strategy(shares={0: 4, 3: later})
    loader = DataLoader(DATASETS[data](), batch_size=4, num_workers=2)
    trainer = lightning.fit(module, strategy, loader, max_epochs=2)
    found = sizes(seen)
    changed = found.index(later)
    assert 3 < changed <= 3 + 2 * 2 + 1
    assert set(found[:changed]) == {4}
    if data != "iterable":
        assert trainer.global_step == 24
        assert set(found[changed:]) == {later}
    if data == "map":
        numbers = [number for batch in seen for number in batch][:ROWS]
        assert sorted(numbers) == list(range(ROWS))


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_validation_schedules_and_limits_hold(pl, shuffle):
    """A smaller batch neither loses the end of an epoch nor its validation, a larger one does not end it early."""
    counts = {"validations": 0, "epochs": 0}

    class Count(pl.pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            counts["validations"] += 1

        def on_train_epoch_end(self, trainer, pl_module):
            counts["epochs"] += 1

    def optimizers(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    module, seen = watching(pl, make_optimizer=optimizers)
    strategy = pl.Strategy(shares={0: 4, 3: 1, 16: 9})
    loader = DataLoader(TensorDataset(rows()), batch_size=4, shuffle=shuffle, drop_last=True)
    trainer = pl.fit(
        module,
        strategy,
        loader,
        max_epochs=3,
        limit_train_batches=10,
        val_check_interval=0.5,
        val_dataloaders=DataLoader(TensorDataset(rows()), batch_size=4),
        num_sanity_val_steps=0,
        callbacks=[Count()],
    )
    assert sizes(seen) == [4] * 3 + [1] * 13 + [9] * 14
    assert counts == {"validations": 6, "epochs": 3}
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 / 8)
    numbers = [number for batch in seen for number in batch]
    assert sorted(numbers[:ROWS]) == list(range(ROWS))


@pytest.mark.parametrize("accumulate", [2, 5])
def test_accumulated_batches_divide_the_share(pl, accumulate):
    module, seen = watching(pl)
    strategy = pl.Strategy(shares={0: 12, 2: 7})
    trainer = pl.fit(
        module, strategy, DataLoader(TensorDataset(rows()), batch_size=4), accumulate_grad_batches=accumulate
    )
    before, after = -(-12 // accumulate), -(-7 // accumulate)
    assert sizes(seen) == [before] * (2 * accumulate) + [after] * (12 - 2 * accumulate)
    assert trainer.global_step == -(-12 // accumulate)
    assert sum(strategy.recorded.samples) == sum(sizes(seen))


def test_one_cycle_ends_with_the_training(pl):
    def optimizers(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=module.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    module, seen = watching(pl, make_optimizer=optimizers)
    loader = DataLoader(TensorDataset(rows()), batch_size=4)
    pl.fit(module, pl.Strategy(shares={0: 4, 3: 1, 9: 16}), loader, max_epochs=2)
    assert len(seen) == 24


def test_max_steps_holds(pl):
    module, seen = watching(pl)
    strategy = pl.Strategy(shares={0: 16, 1: 3})
    pl.fit(module, strategy, DataLoader(TensorDataset(rows()), batch_size=16), max_epochs=-1, max_steps=7)
    assert sizes(seen) == [16] + [3] * 6


def test_a_batch_is_no_larger_than_the_user_allows(pl):
    module, seen = watching(pl)
    strategy = pl.Strategy(shares={0: 4, 2: 40}, max_batch_size=6)
    pl.fit(module, strategy, DataLoader(TensorDataset(rows()), batch_size=4), max_steps=4)
    assert sizes(seen) == [4, 4, 6, 6]


def test_before_the_run_is_joined_its_start_is_assumed(pl):
    """Loaders without a length prefetch a batch before training starts."""
    module, seen = watching(pl)
    strategy = pl.Strategy(shares={0: 12}, min_nodes=3)
    pl.fit(module, strategy, DataLoader(Plain(), batch_size=6), max_steps=2)
    assert sizes(seen) == [4, 12]


def test_the_users_loader_is_untouched(pl):
    loader = DataLoader(TensorDataset(rows()), batch_size=4, shuffle=True)
    before = dict(vars(loader)), dict(vars(loader.batch_sampler))
    module, seen = watching(pl)
    pl.fit(module, pl.Strategy(shares={0: 2}), loader)
    assert (dict(vars(loader)), dict(vars(loader.batch_sampler))) == before
    assert sizes(seen) == [2] * 12
    assert sizes([batch[0] for batch in loader]) == [4] * 12


def test_reloaded_loaders_follow_the_share_in_new_orders(pl):
    module, seen = watching(
        pl, train_dataloader=lambda self: DataLoader(TensorDataset(rows()), batch_size=4, shuffle=True)
    )
    trainer = pl.pl.Trainer(
        strategy=pl.Strategy(shares={0: 4, 14: 2}),
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    assert sizes(seen) == [4] * 14 + [2] * 10
    assert seen[:2] != seen[12:14]


def test_the_same_few_batches_stay_the_same(pl):
    module, seen = watching(pl)
    strategy = pl.Strategy(shares={0: 2})
    pl.fit(module, strategy, DataLoader(TensorDataset(rows()), batch_size=4), overfit_batches=3, max_epochs=2)
    assert seen == [list(range(start, start + 4)) for start in (0, 4, 8)] * 2


class Buckets(BatchSampler):
    pass


class Chunks:
    """Batches from no loader at all."""

    def __iter__(self):
        return iter([(chunk,) for chunk in rows().split(4)])


BUCKETS = Buckets(SequentialSampler(range(ROWS)), 4, False)
RIGID = {
    "buckets": (DataLoader(TensorDataset(rows()), batch_sampler=BUCKETS), "Buckets decides"),
    "batched": (
        DataLoader(rows().split(4), batch_size=None, collate_fn=lambda chunk: (chunk,)),
        "makes the batches itself",
    ),
    "chunks": (Chunks(), "a Chunks, not a torch DataLoader"),
}


@pytest.mark.parametrize("kind", RIGID)
def test_what_cannot_be_resized_is_left_alone_with_one_warning(pl, kind, caplog):
    loader, reason = RIGID[kind]
    module, seen = watching(pl)
    with caplog.at_level(logging.WARNING, logger=pl.name):
        pl.fit(module, pl.Strategy(shares={0: 2}), loader, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    assert sizes(seen) == [4] * 24
    told = [record.message for record in caplog.records if record.name.endswith("gradientmail")]
    assert len(told) == 1
    assert reason in told[0]


def test_several_loaders_keep_their_sizes(pl, caplog):
    sizes_of = []

    def training_step(self, batch, batch_idx):
        sizes_of.append((len(batch["x"][0]), len(batch["y"][0])))
        return self.loss(batch["x"][0] / ROWS)

    loaders = {name: DataLoader(TensorDataset(rows()), batch_size=size) for name, size in (("x", 4), ("y", 8))}
    with caplog.at_level(logging.WARNING, logger=pl.name):
        pl.fit(pl.Module(training_step=training_step), pl.Strategy(shares={0: 2}), loaders, max_epochs=2)
    assert sizes_of == [(4, 8)] * 24
    assert [record.message for record in caplog.records if "there are several of them" in record.message]


def test_without_a_global_batch_size_loaders_are_as_they_were(pl):
    used = []

    class Watch(pl.pl.Callback):
        def on_train_start(self, trainer, pl_module):
            used.append(trainer.train_dataloader)

    loader = DataLoader(TensorDataset(rows()), batch_size=4)
    pl.fit(pl.Module(), pl.Strategy(), loader, callbacks=[Watch()])
    assert used == [loader]


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_in_the_data(pl, node, tmp_path):
    """Another node's order is not this node's: it begins its own."""

    class Save(pl.pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    def loader():
        return DataLoader(TensorDataset(rows()), batch_size=4, shuffle=True)

    pl.pl.seed_everything(1, verbose=False)
    module, whole = watching(pl)
    pl.fit(module, pl.Strategy(shares={0: 4, 3: 2}), loader(), callbacks=[Save()])
    pl.pl.seed_everything(2, verbose=False)
    module, rest = watching(pl)
    strategy = pl.Strategy(shares={0: 2}, node=node)
    pl.fit(module, strategy, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert len(rest) == 7
    assert (rest == whole[5:]) is (node == "a")


@pytest.mark.parametrize("search", ["lr", "batch_size"])
def test_tuners_keep_the_batch_sizes_they_try_and_are_invisible_to_the_run(pl, search, tmp_path):
    module, seen = watching(
        pl,
        train_dataloader=lambda self: DataLoader(TensorDataset(rows()), self.batch_size),
        val_dataloader=lambda self: batches(1),
    )
    module.lr, module.batch_size = 0.01, 4
    options = {**QUIET, "default_root_dir": tmp_path, "max_epochs": 1}
    options.pop("enable_checkpointing")
    strategy = pl.Strategy(shares={0: 3})
    trainer = pl.pl.Trainer(strategy=strategy, **options)
    tuner = pl.pl.tuner.Tuner(trainer)
    if search == "lr":
        tuner.lr_find(module, num_training=4, update_attr=False)
        assert set(sizes(seen)) == {4}
    else:
        tuner.scale_batch_size(module, max_trials=2, steps_per_trial=1, init_val=6)
        assert sizes(seen) == [4, 12]
    assert strategy.sessions == []
    seen.clear()
    trainer.fit(module)
    assert set(sizes(seen)) == {3}
    assert strategy.recorded.names == ["join", "step", "pause", "resume", "close"]
