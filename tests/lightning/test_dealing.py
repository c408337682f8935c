"""Nodes share the samples of a dataset: each is trained on by one of them in a pass, and nothing waits for anybody."""

import json
import threading
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.recipes import UnitKey
from gradientmail_core.protocol.records import Claim
from gradientmail_lightning import SharedQueueDataset
from tests.lightning.nodes import QUIET, batches

ROWS = 48


def rows(count=ROWS):
    """Rows of three features and their own number."""
    return TensorDataset(torch.cat([torch.rand(count, 3), torch.arange(count)[:, None]], dim=1))


def watching(pl, **overrides):
    """A module that notes the rows of each training batch."""
    seen = []

    def training_step(self, batch, batch_idx):
        seen.append([int(number) for number in batch[0][:, 3]])
        return self.loss(batch[0] / ROWS)

    return pl.Module(training_step=training_step, **overrides), seen


def strategy(pl, tmp_path, node="a", **options):
    algorithm = DiLoCo(sync_every=4, fragments=1, follow=False, **options.pop("settings", {}))
    kind = options.pop("kind", pl.gm.GradientMailStrategy)
    return kind((tmp_path / "run").as_uri(), algorithm, node=node, **options)


def loader(**options):
    block = options.pop("block", 4)
    return DataLoader(SharedQueueDataset(rows(), block=block), **{"batch_size": 4, **options})


def numbers(seen):
    return [number for batch in seen for number in batch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_node_alone_reads_all_in_each_pass(lightning, tmp_path, shuffle, workers):
    module, seen = watching(lightning)
    trainer = lightning.fit(
        module, strategy(lightning, tmp_path), loader(shuffle=shuffle, num_workers=workers), max_epochs=2
    )
    first, second = numbers(seen)[:ROWS], numbers(seen)[ROWS:]
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert (first == list(range(ROWS))) is (first == second) is not shuffle
    assert (trainer.global_step, trainer.current_epoch) == (24, 2)


def test_two_nodes_divide_every_pass(pl, tmp_path):
    """Both run in one process, and start when each of them has read a batch ahead."""
    together = threading.Barrier(2)
    modules = {node: watching(pl) for node in "ab"}

    class Meet(pl.pl.Callback):
        def on_train_start(self, trainer, pl_module):
            together.wait(60)

    def life(node):
        pl.fit(modules[node][0], strategy(pl, tmp_path, node), loader(), max_epochs=2, callbacks=[Meet()])

    threads = [threading.Thread(target=life, args=node) for node in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    read = {node: numbers(seen) for node, (_, seen) in modules.items()}
    assert Counter(read["a"] + read["b"]) == dict.fromkeys(range(ROWS), 2)
    assert read["a"] and read["b"]


def test_validation_and_the_last_accumulated_step_come_at_the_end_of_a_pass(pl, tmp_path):
    counts = Counter()

    class Count(pl.pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            counts["validation", trainer.global_step] += 1

        def on_train_epoch_end(self, trainer, pl_module):
            counts["epoch", trainer.global_step] += 1

    module, seen = watching(pl)
    pl.fit(
        module,
        strategy(pl, tmp_path),
        loader(batch_size=5),
        accumulate_grad_batches=3,
        callbacks=[Count()],
        val_dataloaders=batches(1),
        num_sanity_val_steps=1,
    )
    assert [len(batch) for batch in seen] == [5] * 9 + [3]
    assert counts == {("validation", 0): 1, ("validation", 4): 1, ("epoch", 4): 1}


def test_batches_follow_the_share(lightning, tmp_path):
    module, seen = watching(lightning)
    shared = strategy(lightning, tmp_path, settings={"global_batch_size": 6}, max_batch_size=16)
    lightning.fit(module, shared, loader())
    assert [len(batch) for batch in seen] == [6] * 8


def test_incomplete_batches_can_be_dropped(lightning, tmp_path):
    module, seen = watching(lightning)
    lightning.fit(module, strategy(lightning, tmp_path), loader(batch_size=7, drop_last=True), max_epochs=2)
    assert [len(batch) for batch in seen] == [7] * 12
    assert all(count == 2 or number >= 42 for number, count in Counter(numbers(seen)).items())


def test_an_epoch_that_is_cut_short_goes_on_in_the_pass(lightning, tmp_path):
    module, seen = watching(lightning)
    lightning.fit(module, strategy(lightning, tmp_path), loader(), max_epochs=4, limit_train_batches=3)
    assert numbers(seen) == list(range(ROWS))


def test_what_was_not_trained_on_is_given_back(pl, tmp_path):
    """By a node that is done, and by one that fails."""

    class Fail(pl.pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                raise ZeroDivisionError

    read = []
    module, seen = watching(pl)
    pl.fit(module, strategy(pl, tmp_path, "a"), loader(num_workers=1), max_steps=3)
    read += numbers(seen)
    module, seen = watching(pl)
    with pytest.raises(ZeroDivisionError):
        pl.fit(module, strategy(pl, tmp_path, "b"), loader(), max_steps=9, callbacks=[Fail()])
    read += numbers(seen)
    assert read == list(range(20))
    module, seen = watching(pl)
    pl.fit(module, strategy(pl, tmp_path, "c"), loader())
    again = Counter(read + numbers(seen))
    assert set(again) == set(range(ROWS))
    assert [number for number, count in again.items() if count > 1] in ([], [16, 17, 18, 19])


def test_what_a_dead_node_held_is_read_in_the_next_pass_at_the_latest(lightning, tmp_path):
    """A block of the first pass is claimed by a node that nobody ever hears of again."""
    ghost = range(20, 24)

    class Haunt(lightning.pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch:
                threading.Event().wait(1.1)

    module, seen = watching(lightning)
    lightning.fit(module, strategy(lightning, tmp_path), loader(), limit_train_batches=1)
    run = json.loads((tmp_path / "run" / "manifest.json").read_bytes())["run"]
    claim = tmp_path / "run" / UnitKey(f"data-{ROWS}x4-000000", ghost[0] // 4, "claim").path
    claim.parent.mkdir(exist_ok=True)
    claim.write_bytes(Claim(run, "ghost", "0" * 16, "0" * 16).encoded())
    shared = strategy(lightning, tmp_path, lease_timeout=1.0)
    lightning.fit(module, shared, loader(), max_epochs=2, callbacks=[Haunt()])
    assert Counter(numbers(seen)) == dict.fromkeys(range(ROWS), 2)
    assert numbers(seen).index(ghost[0]) > ghost[0]


def test_a_late_node_goes_on_in_the_epoch_of_the_others(pl, tmp_path):
    module, _ = watching(pl)
    pl.fit(module, strategy(pl, tmp_path, "a"), loader(), max_epochs=2)
    module, seen = watching(pl)
    trainer = pl.fit(module, strategy(pl, tmp_path, "b"), loader(), max_epochs=3)
    assert (trainer.current_epoch, sorted(numbers(seen))) == (3, list(range(ROWS)))
    module, seen = watching(pl)
    trainer = pl.fit(module, strategy(pl, tmp_path, "c"), loader(), max_epochs=3)
    assert (trainer.current_epoch, seen) == (3, [])
    module, seen = watching(pl)
    pl.fit(module, strategy(pl, tmp_path, "c", follow_run=False), loader(), max_epochs=1)
    assert sorted(numbers(seen)) == list(range(ROWS))


def test_a_checkpoint_goes_on_within_the_blocks_it_held(pl, tmp_path):
    class Break(pl.pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "half.ckpt")
                raise ZeroDivisionError

    module, first = watching(pl)
    with pytest.raises(ZeroDivisionError):
        pl.fit(module, strategy(pl, tmp_path), loader(block=24), callbacks=[Break()])
    module, rest = watching(pl)
    pl.fit(module, strategy(pl, tmp_path), loader(block=24), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert numbers(first) + numbers(rest) == list(range(ROWS))


def test_a_checkpoint_of_the_last_validation_goes_on_with_the_next_pass(pl, tmp_path):
    checkpoint = pl.pl.callbacks.ModelCheckpoint(tmp_path / "saved", save_last=True)
    options = {"val_dataloaders": batches(1), "num_sanity_val_steps": 0}
    pl.fit(
        pl.Module(),
        strategy(pl, tmp_path),
        loader(),
        max_epochs=2,
        callbacks=[checkpoint],
        enable_checkpointing=True,
        **options,
    )
    module, seen = watching(pl)
    last = tmp_path / "saved" / "last.ckpt"
    trainer = pl.fit(
        module, strategy(pl, tmp_path), loader(), max_epochs=3, ckpt_path=last, weights_only=True, **options
    )
    assert (sorted(numbers(seen)), trainer.current_epoch) == (list(range(ROWS)), 3)


@pytest.mark.parametrize("search", ["lr", "batch_size"])
def test_tuners_read_the_dataset_itself(lightning, tmp_path, search):
    module, seen = watching(
        lightning,
        train_dataloader=lambda self: loader(batch_size=self.batch_size),
        val_dataloader=lambda self: batches(1),
    )
    module.lr, module.batch_size = 0.01, 4
    options = {**QUIET, "default_root_dir": tmp_path, "max_epochs": 1}
    options.pop("enable_checkpointing")
    trainer = lightning.pl.Trainer(strategy=strategy(lightning, tmp_path), **options)
    tuner = lightning.pl.tuner.Tuner(trainer)
    if search == "lr":
        tuner.lr_find(module, num_training=4, update_attr=False)
    else:
        tuner.scale_batch_size(module, max_trials=1, steps_per_trial=1, init_val=6)
    assert not (tmp_path / "run").exists()
    seen.clear()
    trainer.fit(module)
    assert sorted(numbers(seen)) == list(range(ROWS))


@pytest.mark.parametrize("options", [{"fast_dev_run": 2}, {"overfit_batches": 2}, {"max_steps": 0}], ids=str)
def test_where_nothing_is_dealt_it_is_the_dataset_itself(lightning, tmp_path, options):
    module, seen = watching(lightning)
    lightning.fit(module, strategy(lightning, tmp_path), loader(), **options)
    assert numbers(seen) == ([] if options == {"max_steps": 0} else list(range(8)))
    assert not (tmp_path / "run" / "units").exists()


def test_without_a_run_it_is_the_dataset_itself(lightning):
    data = SharedQueueDataset(rows())
    module, seen = watching(lightning)
    lightning.fit(module, "auto", DataLoader(data, batch_size=4, num_workers=2))
    assert numbers(seen) == list(range(ROWS))
    assert (len(data), data.block, int(data[3][0][3])) == (ROWS, 8, 3)


SAMPLERS = {
    "weighted": {"sampler": WeightedRandomSampler([1.0] * ROWS, ROWS)},
    "with replacement": {"sampler": RandomSampler(range(ROWS), replacement=True)},
    "batched": {"batch_size": None},
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_and_a_queue_do_not_mix(lightning, tmp_path, kind):
    with pytest.raises(ConfigurationError, match="the queue decides who reads what"):
        lightning.fit(lightning.Module(), strategy(lightning, tmp_path), loader(**SAMPLERS[kind]))


def test_two_datasets_of_one_name_are_refused(lightning, tmp_path):
    with pytest.raises(ConfigurationError, match="name= of its own"):
        lightning.fit(lightning.Module(), strategy(lightning, tmp_path), [loader(), loader()])


def test_a_gossip_run_deals_nothing(lightning, tmp_path):
    shared = lightning.gm.GradientMailStrategy((tmp_path / "run").as_uri(), FactoredGossip.noloco())
    with pytest.raises(ConfigurationError, match="gossip run deals no samples"):
        lightning.pl.Trainer(strategy=shared, **QUIET).fit(lightning.Module(), loader())
