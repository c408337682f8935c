"""Validation and test see the committed parameters if asked, and training goes on from its own."""

import pytest
import torch

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.errors import ConfigurationError, RunMismatch
from gradientmail_core.session import Session
from gradientmail_lightning.evaluating import checked_choice
from tests.lightning.nodes import QUIET, batches


def test_what_to_evaluate_is_one_of_two(pl):
    assert checked_choice("global") == "global"
    with pytest.raises(ConfigurationError, match="'local', 'global'"):
        pl.Strategy(evaluate="both")


def evaluated(pl, evaluate, callbacks=(), **options):
    """The bias at each validation and after each batch, with 7.0 committed at step 2 and a validation each 3."""
    seen = {"validation": [], "batch": []}

    def validation_step(self, batch, batch_idx):
        seen["validation"].append(self.net.bias.item())
        return self.loss(batch[0])

    class Watch(pl.pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen["batch"].append(pl_module.net.bias.item())

    module = pl.Module(validation_step=validation_step)
    strategy = pl.Strategy(commits={2: 7.0}, evaluate=evaluate)
    pl.fit(
        module,
        strategy,
        callbacks=[Watch(), *callbacks],
        val_check_interval=3,
        limit_train_batches=6,
        val_dataloaders=batches(1),
        num_sanity_val_steps=1,
        **options,
    )
    return seen, strategy.recorded


def test_validation_sees_what_was_committed(pl):
    torch.manual_seed(1)
    seen, session = evaluated(pl, "global")
    assert seen["validation"][1:] == [7.0, 7.0]
    assert session.names == ["join", "step", "lend", "return", "step", "lend", "return", "close"]
    torch.manual_seed(1)
    local, session = evaluated(pl, "local")
    assert session.names == ["join", "step", "pause", "resume", "step", "pause", "resume", "close"]
    assert local["batch"] == seen["batch"]
    assert local["validation"][1] not in (7.0, local["validation"][2])


def test_checkpoints_of_a_validation_hold_this_nodes_own(pl, tmp_path):
    checkpoint = pl.pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1)
    seen, _ = evaluated(pl, "global", callbacks=[checkpoint], enable_checkpointing=True)
    assert seen["validation"][1:] == [7.0, 7.0]
    saved = [torch.load(path, weights_only=True)["state_dict"]["net.bias"].item() for path in tmp_path.glob("*.ckpt")]
    assert saved
    assert 7.0 not in saved


def test_an_error_in_a_validation_leaves_this_nodes_own(pl):
    module_of = []

    class Fail(pl.pl.Callback):
        def on_validation_batch_end(self, trainer, pl_module, *args):
            if not trainer.sanity_checking:
                module_of.append((pl_module, pl_module.net.bias.item()))
                raise ZeroDivisionError("oh")

    with pytest.raises(ZeroDivisionError):
        evaluated(pl, "global", callbacks=[Fail()])
    module, during = module_of[0]
    assert during == 7.0
    assert module.net.bias.item() != 7.0


@pytest.fixture
def run(tmp_path):
    """A mailbox with a run in it, whose parameters are all 3."""
    model = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(model.weight, 3.0)
    torch.nn.init.constant_(model.bias, 3.0)
    url = (tmp_path / "run").as_uri()
    with Session(model, mailbox=url, algorithm=DiLoCo(sync_every=1, fragments=1)) as session:
        session.step(1)
    return url


@pytest.mark.parametrize("kind", ["validate", "test"])
def test_evaluation_alone_looks_the_newest_commit_up(pl, run, kind):
    seen = []

    def evaluate_step(self, batch, batch_idx):
        seen.append(self.net.bias.item())

    module = pl.Module(validation_step=evaluate_step, test_step=evaluate_step)
    before = module.net.bias.item()
    for evaluate, expected in (("global", 3.0), ("local", before)):
        strategy = pl.gm.GradientMailStrategy(mailbox=run, evaluate=evaluate)
        getattr(pl.pl.Trainer(strategy=strategy, **QUIET), kind)(module, batches(1), verbose=False)
        assert (seen.pop(), module.net.bias.item()) == (expected, before)


def test_there_must_be_a_run_to_look_at(pl, tmp_path):
    (tmp_path / "empty").mkdir()
    strategy = pl.gm.GradientMailStrategy(mailbox=(tmp_path / "empty").as_uri(), evaluate="global")
    with pytest.raises(RunMismatch, match="no run at"):
        pl.pl.Trainer(strategy=strategy, **QUIET).validate(pl.Module(), batches(1), verbose=False)
