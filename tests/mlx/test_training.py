"""What ``train`` is given: mlx-lm's arguments, and a session or the settings of one."""

# ruff: noqa: E402  # what follows the skip needs mlx

import inspect
import json

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm.tuner import trainer as stock

import gradientmail_core as gm
from gradientmail_core.errors import ConfigurationError, SchemaMismatch
from gradientmail_core.events import NodeAppeared, RunWaited, SnapshotPublished
from gradientmail_core.sinks import JsonLines
from gradientmail_mlx import train
from gradientmail_mlx.training import announce
from tests.mlx.nodes import Bigram, Node, Reports, counting, tiny_llama
from tests.offices import LEASE_SECONDS, SETTINGS, Vacancy

QUICK = gm.DiLoCo(sync_every=2, fragments=2, overlap_steps=0, follow=False)


def test_its_arguments_begin_with_mlx_lms():
    theirs, ours = (list(inspect.signature(function).parameters) for function in (stock.train, train))
    assert ours[: len(theirs)] == theirs
    assert "session" in ours[len(theirs) :]


def test_a_node_alone_trains_and_leaves_the_newest_commit(tmp_path, capsys):
    node, reports, mailbox = Node(tmp_path), Reports(), gm.MemoryMailbox()
    train(
        node.model,
        node.optimizer,
        counting(),
        args=node.args,
        training_callback=reports,
        mailbox=mailbox,
        algorithm=QUICK,
        node="a",
    )
    assert reports.train[-1]["gradientmail/merged_rounds"] >= 3
    said = capsys.readouterr().out
    assert "GradientMail: created run" in said
    assert "GradientMail: a left after" in said
    other = tiny_llama(9)
    gm.align(other, mailbox=mailbox)
    committed = dict(nn.utils.tree_flatten(other.trainable_parameters()))
    assert node.file.keys() == committed.keys()
    assert all(mx.array_equal(node.file[name], committed[name]) for name in committed)


def test_settings_come_from_the_environment(tmp_path, monkeypatch):
    node = Node(tmp_path)
    monkeypatch.setenv("GRADIENTMAIL_MAILBOX", (tmp_path / "run").as_uri())
    monkeypatch.setenv("GRADIENTMAIL_SYNC_EVERY", "2")
    monkeypatch.setenv("GRADIENTMAIL_FRAGMENTS", "1")
    monkeypatch.setenv("GRADIENTMAIL_NODE", "berlin")
    train(node.model, node.optimizer, counting(), args=node.args)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["algorithm"]["sync_every"], manifest["algorithm"]["fragments"]) == (2, 1)
    assert list((tmp_path / "run").rglob("*berlin*"))


@pytest.mark.parametrize("told", ["argument", "environment"])
def test_one_named_node_can_close_all_rounds(told, tmp_path, monkeypatch):
    """As a store without a conditional create needs it: the run says so, and that node creates it."""
    monkeypatch.setenv("GRADIENTMAIL_SYNCER", "a" if told == "environment" else "b")
    options = {"syncer": "a"} if told == "argument" else {}
    node, url = Node(tmp_path), (tmp_path / "run").as_uri()
    train(node.model, node.optimizer, counting(), args=node.args, mailbox=url, algorithm=QUICK, node="a", **options)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_bytes())
    assert (manifest["store"], set(manifest["closers"])) == ("none", {"a"})


def test_a_session_of_ones_own_may_be_joined_or_not(tmp_path):
    for joined in (False, True):
        node = Node(tmp_path)
        session = gm.Session(node.model, mailbox=gm.MemoryMailbox(), algorithm=QUICK)
        if joined:
            session.join()
        train(node.model, node.optimizer, counting(), args=node.args, session=session)
        assert session.ended
        assert session.global_step == 6


def test_a_session_and_settings_do_not_mix(tmp_path):
    node = Node(tmp_path)
    with pytest.raises(ConfigurationError, match="settings for another"):
        train(node.model, node.optimizer, counting(), session=node.session, mailbox="memory://")


def test_the_sessions_model_must_be_the_one_that_trains(tmp_path):
    node = Node(tmp_path)
    with pytest.raises(ConfigurationError, match="another model"):
        train(tiny_llama(), node.optimizer, counting(), args=node.args, session=node.session)


def test_without_a_mailbox_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.delenv("GRADIENTMAIL_MAILBOX", raising=False)
    with pytest.raises(ConfigurationError, match="No mailbox was given"):
        train(tiny_llama(), optim.Adam(0.1), counting())


def test_another_model_is_refused_with_a_diff(tmp_path):
    mailbox = gm.MemoryMailbox()
    node = Node(tmp_path, 2)
    train(node.model, node.optimizer, counting(), args=node.args, mailbox=mailbox, algorithm=QUICK)
    node = Node(tmp_path, 2)
    node.model.layers[0].freeze()
    with pytest.raises(SchemaMismatch, match=r"model\.layers\.0"):
        train(node.model, node.optimizer, counting(), args=node.args, mailbox=mailbox, algorithm=QUICK)


def test_running_statistics_are_a_warning(tmp_path, capsys):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.norm = nn.Embedding(32, 32), nn.BatchNorm(32)

        def __call__(self, tokens):
            return self.norm(self.table(tokens))

    node = Node(tmp_path, 1, {}, Normed())
    train(node.model, node.optimizer, counting(), args=node.args, session=node.session)
    assert "2 running statistics (such as norm.running_mean) are not merged" in capsys.readouterr().out


def test_a_person_is_told_what_matters(capsys):
    announce(NodeAppeared("b"))
    announce(RunWaited("waiting for 1 more node"))
    announce(SnapshotPublished(0, 1, 2, 3, 4, 0.5))
    assert capsys.readouterr().out == "GradientMail: b is here\nGradientMail: waiting for 1 more node\n"


def test_a_node_of_role_either_closes_for_all_when_the_syncer_is_gone(tmp_path):
    node = Node(tmp_path, options={"steps_per_report": 1}, model=Bigram())
    with Vacancy(tmp_path / "run") as vacancy:

        class Wait(Reports):
            def on_train_loss_report(self, info):
                vacancy.wait(info["iteration"])

        options = {"role": "either", "lease_timeout": LEASE_SECONDS, "callbacks": [vacancy.heard]}
        url = (tmp_path / "run").as_uri()
        train(
            node.model, node.optimizer, counting(), args=node.args, training_callback=Wait(),
            mailbox=url, algorithm=SETTINGS, node="e", **options,
        )  # fmt: skip
    assert vacancy.elections[0] is True and vacancy.closed_in_office >= 2


def test_every_event_goes_to_the_callbacks_that_were_given_and_a_syncer_is_no_trainer(tmp_path, monkeypatch):
    node, sink = Node(tmp_path, model=Bigram()), JsonLines(tmp_path / "events.jsonl")
    options = {"args": node.args, "mailbox": gm.MemoryMailbox(), "algorithm": QUICK, "node": "a", "callbacks": [sink]}
    train(node.model, node.optimizer, counting(), **options)
    kinds = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {"RunCreated", "RoundCommitted", "FragmentAligned"} <= set(kinds) and kinds[-1] == "SessionEnded"
    monkeypatch.setenv("GRADIENTMAIL_ROLE", "syncer")
    with pytest.raises(ConfigurationError, match="gradientmail syncer URL"):
        train(node.model, node.optimizer, counting(), **options)
