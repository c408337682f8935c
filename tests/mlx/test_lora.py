"""mlx-lm's command line in a run: its options go through, ours choose the run, the adapter loads with mlx-lm."""

# ruff: noqa: E402  # what follows the skip needs mlx

import os
import signal
from functools import partial

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from mlx.utils import tree_flatten, tree_map
from mlx_lm import lora as stock
from mlx_lm.utils import load

import gradientmail_core as gm
from gradientmail_mlx import lora, train
from tests.mlx.bases import command


def run(tmp_path):
    return (tmp_path / "run").as_uri()


def test_the_command_trains_in_a_run_and_its_adapter_holds_the_commit(base, tmp_path, capsys):
    out = tmp_path / "adapters"
    settings = ["--mailbox", run(tmp_path), "--sync-every", "2", "--fragments", "2", "--node", "berlin"]
    before = stock.train
    code = lora.main([*settings, *command(base, out, "--train", "--overlap-steps", "0", "--test")])
    assert code == 0
    assert stock.train is before
    said = capsys.readouterr().out
    assert "GradientMail: created run" in said
    assert "GradientMail: berlin left after" in said
    assert "Test loss" in said
    model, _ = load(str(base / "model"), adapter_path=str(out))
    parameters = dict(tree_flatten(model.parameters()))
    adapter = mx.load(str(out / "adapters.safetensors"))
    assert {name.rpartition(".")[2] for name in adapter} == {"lora_a", "lora_b"}
    assert all(mx.array_equal(parameters[name], adapter[name]) for name in adapter)
    assert any(array.any() for name, array in adapter.items() if name.endswith("lora_b"))
    model.freeze()
    model.unfreeze(keys=["lora_a", "lora_b"])
    model.update(tree_map(mx.zeros_like, model.trainable_parameters()))
    gm.align(model, mailbox=run(tmp_path))
    committed = dict(tree_flatten(model.trainable_parameters()))
    assert committed.keys() == adapter.keys()
    assert all(mx.array_equal(committed[name], adapter[name]) for name in adapter)


def test_a_test_alone_needs_no_run(base, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("GRADIENTMAIL_MAILBOX", raising=False)
    assert lora.main(command(base, "", "--test", "--test-batches", "1")) == 0
    assert "Test loss" in capsys.readouterr().out


def test_what_is_missing_is_said_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.delenv("GRADIENTMAIL_MAILBOX", raising=False)
    assert lora.main(["--train", "--model", "nowhere"]) == 1
    assert "No mailbox was given" in capsys.readouterr().err
    assert lora.main(["--train", "--mailbox", "memory://", "--sync-every", "many"]) == 1
    assert "GRADIENTMAIL_SYNC_EVERY is 'many'" in capsys.readouterr().err


def test_help_names_both_kinds_of_options(capsys):
    assert lora.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "--mailbox" in said
    assert "--syncer" in said
    assert "--fine-tune-type" in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_run(base, tmp_path, monkeypatch, number, code):
    ended = []
    abort = gm.Session.abort

    def noted(session, reason="aborted"):
        ended.append((session.joined, reason))
        abort(session, reason)

    def interrupt(*batch):
        os.kill(os.getpid(), number)
        raise AssertionError("the signal came later")

    monkeypatch.setattr(gm.Session, "abort", noted)
    monkeypatch.setattr(lora, "train", partial(train, loss=interrupt))
    arguments = ["--mailbox", run(tmp_path), *command(base, tmp_path / "adapters", "--train")]
    try:
        assert lora.main(arguments) == code
    except SystemExit as error:
        assert error.code == code
    assert ended[0][0]
    assert ended[0][1].startswith(("KeyboardInterrupt", "SystemExit"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
