"""What the callback is told, by the program or by the environment, and what it refuses."""

import json

import pytest
from transformers import TrainerCallback

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.errors import ConfigurationError
from gradientmail_hf import GradientMailCallback
from tests.hf.nodes import fit
from tests.offices import LEASE_SECONDS, SETTINGS, Vacancy


def test_options_come_from_the_program_then_from_the_environment(monkeypatch):
    with pytest.raises(ConfigurationError, match="No mailbox was given"):
        GradientMailCallback()
    monkeypatch.setenv("GRADIENTMAIL_MAILBOX", "file:///there")
    monkeypatch.setenv("GRADIENTMAIL_SYNC_EVERY", "7")
    monkeypatch.setenv("GRADIENTMAIL_NODE", "berlin")
    told = GradientMailCallback()
    assert (told.mailbox, told.node, told.algorithm.sync_every) == ("file:///there", "berlin", 7)
    chosen = GradientMailCallback(mailbox="file:///here", algorithm=DiLoCo(), node="paris")
    assert (chosen.mailbox, chosen.node, chosen.algorithm) == ("file:///here", "paris", DiLoCo())


@pytest.mark.parametrize("told", ["argument", "environment"])
def test_one_named_node_can_close_all_rounds(told, tmp_path, monkeypatch):
    """As a store without a conditional create needs it: the run says so, and that node creates it."""
    monkeypatch.setenv("GRADIENTMAIL_SYNCER", "a" if told == "environment" else "b")
    options = {"syncer": "a"} if told == "argument" else {}
    settings = DiLoCo(sync_every=4, fragments=1)
    fit(tmp_path, GradientMailCallback((tmp_path / "run").as_uri(), settings, node="a", callbacks=[], **options))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_bytes())
    assert (manifest["store"], manifest["closers"]) == ("none", ["a"])


def test_options_that_cannot_work_are_refused():
    with pytest.raises(ConfigurationError, match="evaluate is 'both'"):
        GradientMailCallback("memory://", evaluate="both")
    with pytest.raises(ConfigurationError, match="max_batch_size is 0"):
        GradientMailCallback("memory://", max_batch_size=0)


def test_a_node_of_role_either_closes_for_all_when_the_syncer_is_gone(tmp_path):
    with Vacancy(tmp_path / "run") as vacancy:

        class Wait(TrainerCallback):
            def on_step_end(self, args, state, control, **parts):
                vacancy.wait(state.global_step)

        options = {"role": "either", "lease_timeout": LEASE_SECONDS, "callbacks": [vacancy.heard]}
        callback = GradientMailCallback((tmp_path / "run").as_uri(), SETTINGS, node="e", **options)
        fit(tmp_path, [callback, Wait()])
    assert vacancy.elections[0] is True and vacancy.closed_in_office >= 2


def test_a_role_comes_from_the_program_then_from_the_environment_and_a_syncer_is_no_trainer(monkeypatch):
    monkeypatch.setenv("GRADIENTMAIL_ROLE", "either")
    assert GradientMailCallback("file:///there").role == "either"
    assert GradientMailCallback("file:///there", role="learner").role == "learner"
    with pytest.raises(ConfigurationError, match="gradientmail syncer URL"):
        GradientMailCallback("file:///there", role="syncer")
