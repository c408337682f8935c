"""When the session joins, steps and leaves, in every way the Trainer can train."""

import json
import logging
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import NodeGone, RunJoined, RunWaited
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_hf import GradientMailCallback
from gradientmail_hf.callback import Announcer
from tests.hf.nodes import LENGTH, RecordingCallback, fit, llama, rows, trainer
from tests.sessions import LAST

EIGHT = [4 * LENGTH] * 8


def embedding(model):
    return model.model.embed_tokens.weight


# Steps and samples


def test_one_step_for_each_optimizer_step(tmp_path):
    callback = RecordingCallback()
    fit(tmp_path, callback)
    assert callback.recorded.names == ["join", "step", "close"]
    assert callback.recorded.samples == EIGHT


@pytest.mark.parametrize(("accumulate", "expected"), [(2, [8] * 4), (3, [12, 12, 8]), (8, [32])])
def test_accumulated_batches_are_one_step_with_all_their_tokens(tmp_path, accumulate, expected):
    callback = RecordingCallback()
    fit(tmp_path, callback, gradient_accumulation_steps=accumulate, max_steps=-1, num_train_epochs=1)
    assert callback.recorded.samples == [LENGTH * rows for rows in expected]


def test_a_short_last_batch_counts_what_it_has(tmp_path):
    callback = RecordingCallback()
    fit(tmp_path, callback, data=rows(10), max_steps=-1, num_train_epochs=1)
    assert callback.recorded.samples == [24, 24, 12]


class SkippingScaler(torch.amp.GradScaler):
    """Finds overflow in chosen steps, as fp16 training does; scaling by one needs no GPU."""

    def __init__(self, skip):
        super().__init__("cpu", init_scale=1.0, growth_interval=10**6)
        self._skip, self._asked = skip, 0

    def scale(self, outputs):
        self._asked += 1
        return super().scale(outputs) * (float("inf") if self._asked in self._skip else 1.0)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_a_step_the_scaler_skipped_is_not_counted_and_its_tokens_are(tmp_path, optimizer):
    """A fused optimizer is not skipped but told of the overflow; Accelerate says then that it stepped."""
    callback = RecordingCallback()
    made = trainer(tmp_path, callback, max_grad_norm=0.0, optim=optimizer)
    made.accelerator.scaler = SkippingScaler({2, 5})
    made.train()
    assert made.state.global_step == 8
    assert callback.recorded.samples == [24, 48, 24, 48, 24, 24]


def test_the_trainers_own_count_of_tokens_goes_before(tmp_path):
    padded = rows()
    for row in padded:
        row["attention_mask"] = torch.ones(LENGTH, dtype=torch.long)
        row["attention_mask"][4:] = 0
    callback = RecordingCallback()
    made = fit(
        tmp_path, callback, data=padded, include_num_input_tokens_seen="non_padding", gradient_accumulation_steps=2
    )
    assert callback.recorded.samples == [32] * 8
    assert made.state.num_input_tokens_seen == 32 * 8


def test_tokens_can_be_counted_by_the_user(tmp_path):
    callback = RecordingCallback(tokens=lambda batch: len(batch["input_ids"]))
    fit(tmp_path, callback, include_num_input_tokens_seen="all")
    assert callback.recorded.samples == [4] * 8


# What the others see


def test_a_commit_is_seen_by_later_callbacks_logs_evaluation_and_checkpoint(tmp_path):
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                seen.append(("step", embedding(kwargs["model"])[0, 0].item()))

        def on_prediction_step(self, args, state, control, **kwargs):
            seen.append(("evaluation", embedding(kwargs["model"])[0, 0].item()))

        def on_save(self, args, state, control, **kwargs):
            seen.append(("save", embedding(kwargs["model"])[0, 0].item()))

    callback = RecordingCallback(commits={2: 7.0})
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    fit(tmp_path, [Watch(), callback], eval_dataset=rows(4), **options)
    assert [entry for entry in seen if entry[1] == 7.0] == [("step", 7.0), ("evaluation", 7.0), ("save", 7.0)]


def test_the_step_is_in_what_the_session_reads(tmp_path):
    """The optimizer's step is done, once, when the session looks at the parameters."""
    callback = RecordingCallback(commits={1: 0.0})
    fit(tmp_path / "run", callback, max_steps=1)
    twin = RecordingCallback()
    fit(tmp_path / "twin", twin, max_steps=1)
    assert np.array_equal(callback.recorded.before_commit[0], twin.recorded.values())


def test_a_commit_leaves_optimizer_state_in_place(tmp_path):
    callback = RecordingCallback(commits={4: 0.5})
    made = fit(tmp_path, callback)
    state = made.optimizer.optimizer.state
    assert {id(parameter) for parameter in made.model.parameters()} == {id(key) for key in state}
    assert all(entry["step"] == 8 for entry in state.values())


def test_a_rolled_back_node_forgets_its_optimizers_state(tmp_path):
    callback = RecordingCallback()
    found = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                callback.recorded.model.reset_optimizer()
                found.append(len(kwargs["optimizer"].optimizer.state))

    made = fit(tmp_path, [callback, Watch()])
    assert found == [0]
    assert all(entry["step"] == 4 for entry in made.optimizer.optimizer.state.values())


# No session


def test_nothing_is_joined_where_nothing_is_trained(tmp_path):
    callback = RecordingCallback()
    fit(tmp_path, callback, max_steps=-1, num_train_epochs=0)
    made = trainer(tmp_path, callback, eval_dataset=rows(4))
    made.evaluate()
    made.predict(rows(4))
    assert callback.sessions == []


def test_a_hyperparameter_search_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.integrations.integration_utils, "is_ray_tune_available", lambda: True)
    callback = RecordingCallback()
    made = trainer(tmp_path, callback, model_init=lambda: llama())
    with pytest.raises(ConfigurationError, match="hyperparameter search"):
        made.train(trial={"learning_rate": 1e-3})
    assert callback.sessions == []


# Ends


def test_a_second_training_is_a_second_session(tmp_path):
    callback = RecordingCallback()
    made = fit(tmp_path, callback)
    made.train()
    assert [session.samples for session in callback.sessions] == [EIGHT, EIGHT]
    assert sum(known is callback for known in made.callback_handler.callbacks) == 1


def test_one_callback_serves_one_trainer_after_the_other(tmp_path):
    callback = RecordingCallback()
    fit(tmp_path, callback)
    fit(tmp_path, callback, max_steps=2)
    assert [session.samples for session in callback.sessions] == [EIGHT, EIGHT[:2]]


def test_the_session_is_over_when_the_last_evaluation_begins(tmp_path):
    callback = RecordingCallback(commits={LAST: 3.0})
    seen = []

    class Watch(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            seen.append((state.global_step, callback.recorded.names[-1], embedding(kwargs["model"])[0, 0].item()))

    made = fit(tmp_path, [callback, Watch()], eval_dataset=rows(4), eval_strategy="epoch", save_strategy="epoch")
    assert seen[-1] == (8, "close", 3.0)
    assert torch.all(embedding(made.model) == 3.0)


def best_model_options():
    return {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_dataset": rows(4),
    }


def test_the_best_model_outlives_the_last_commit(tmp_path):
    """Training ends on weights that are far worse than those of step 2, which are loaded and stay."""
    callback = RecordingCallback(commits={3: 9.0, 4: 9.0, 5: 9.0, LAST: 9.0})
    made = fit(tmp_path, callback, **best_model_options(), max_steps=6)
    assert made.state.best_global_step == 2
    assert callback.recorded.names == ["join", "step", "pause", "resume", "step", "pause", "resume", "step", "close"]
    assert embedding(made.model).abs().max() < 5.0


def test_early_stopping_leaves_at_the_end_of_its_epoch(tmp_path):
    callback = RecordingCallback(commits={4: 9.0, LAST: 9.0})
    made = fit(tmp_path, [callback, EarlyStoppingCallback(1)], **best_model_options(), max_steps=20)
    assert made.state.global_step == 4
    assert callback.recorded.names[-1] == "close"
    assert len(callback.recorded.samples) == made.state.global_step
    assert embedding(made.model).abs().max() < 5.0


def test_a_loader_that_ends_early_ends_the_session(tmp_path):
    class Short(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from rows(8)

    callback = RecordingCallback()

    class Stop(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    fit(tmp_path, [callback, Stop()], data=Short(), max_steps=20)
    assert callback.recorded.names == ["join", "step", "close"]
    assert callback.recorded.samples == EIGHT[:2]


@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
def test_an_exception_aborts(tmp_path, error):
    callback = RecordingCallback()
    with pytest.raises(type(error)):
        fit(tmp_path, callback, failures={2: error})
    reason = "ZeroDivisionError: oh" if isinstance(error, ZeroDivisionError) else "KeyboardInterrupt"
    assert callback.recorded.calls[-1] == ("abort", reason)
    assert callback.recorded.names == ["join", "step", "abort"]


def test_an_exception_aborts_where_the_callback_was_added_late(tmp_path):
    callback = RecordingCallback()
    made = trainer(tmp_path, [], failures={2: ZeroDivisionError("oh")})
    made.add_callback(callback)
    with pytest.raises(ZeroDivisionError):
        made.train()
    assert callback.recorded.calls[-1] == ("abort", "ZeroDivisionError: oh")


def test_an_exception_in_a_callback_or_the_data_aborts(tmp_path):
    class Broken(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ZeroDivisionError("oh")

    callback = RecordingCallback()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, [callback, Broken()])
    assert callback.recorded.names == ["join", "step", "abort"]
    callback = RecordingCallback()
    with pytest.raises(KeyError):
        fit(tmp_path, callback, data=[*rows(3), {"labels": torch.zeros(LENGTH, dtype=torch.long)}])
    assert callback.recorded.names[-1] == "abort"


def test_a_sigterm_aborts_and_is_no_success(tmp_path):
    class Killed(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                signal.raise_signal(signal.SIGTERM)

    callback = RecordingCallback()
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, [callback, Killed()])
    assert ended.value.code == 143
    assert callback.recorded.names == ["join", "step", "abort"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_smaller_batch_size_begins_a_new_session(tmp_path):
    """``auto_find_batch_size`` begins training again and again; each beginning gives the last one up."""
    failures = {number: RuntimeError("CUDA out of memory.") for number in (2, 3)}
    callback = RecordingCallback()
    fit(tmp_path, callback, auto_find_batch_size=True, failures=failures, max_steps=4)
    assert [session.names[-1] for session in callback.sessions] == ["abort", "abort", "close"]
    assert callback.sessions[-1].samples == [LENGTH * 2] * 4


def test_a_smaller_batch_size_joins_the_same_run_again(tmp_path):
    """With a real session: the lease of the attempt that failed does not stand in the way."""
    settings = DiLoCo(sync_every=2, fragments=1, overlap_steps=0, follow=False)
    callback = GradientMailCallback(MemoryMailbox(), settings, node="a", callbacks=[])
    made = fit(tmp_path, callback, auto_find_batch_size=True, failures={5: RuntimeError("CUDA out of memory.")})
    assert made.state.global_step == 8 and len(made.read) == 9
    assert made.state.log_history[-1]["gradientmail/round"] == 4
    assert made.state.log_history[-1]["gradientmail/global_step"] == 8


def test_a_training_that_never_ended_is_given_up_when_the_next_begins(tmp_path):
    """Some programs drive the Trainer's loop themselves, and no exception need have told of the end."""
    callback = RecordingCallback()
    made = trainer(tmp_path, callback, failures={2: ZeroDivisionError("oh")})
    vars(made).pop("_run_epoch")
    with pytest.raises(ZeroDivisionError):
        made._inner_training_loop(batch_size=4, args=made.args)
    made.train()
    assert callback.sessions[0].calls[-1] == ("abort", "training began anew")
    assert callback.sessions[1].samples == EIGHT


def test_a_failed_session_ends_the_training(tmp_path):
    callback = RecordingCallback(fail_at=3)
    with pytest.raises(RuntimeError, match="the store is gone"):
        fit(tmp_path, callback)
    assert callback.recorded.calls[-1] == ("abort", "RuntimeError: the store is gone")


def test_a_session_that_cannot_even_abort_hides_nothing(tmp_path):
    callback = RecordingCallback()

    class Broken(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            def abort(reason):
                raise OSError("no network")

            callback.recorded.abort = abort
            raise ZeroDivisionError("oh")

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, [callback, Broken()])


# Evaluation


def evaluated_weights(folder, **options):
    callback = RecordingCallback(commits={1: 1.0}, **options)
    seen = []

    class Watch(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            seen.append(bool(torch.all(embedding(kwargs["model"]) == 1.0)))

    twin = fit(folder / "twin", RecordingCallback(commits={1: 1.0}), max_steps=6)
    made = fit(
        folder,
        [callback, Watch()],
        eval_dataset={"x": rows(4), "y": rows(4)},
        eval_strategy="steps",
        eval_steps=2,
        max_steps=6,
        eval_on_start=True,
    )
    same = torch.equal(embedding(twin.model), embedding(made.model))
    return seen, callback.recorded.names, same


def test_evaluation_uses_the_nodes_own_model_and_nobody_waits_meanwhile(tmp_path):
    seen, names, same = evaluated_weights(tmp_path)
    assert same
    assert seen == [False] * 8
    assert names == ["join", *["pause", "resume", "step"] * 3, "close"]


def test_evaluation_uses_the_global_model_if_asked_and_gives_the_own_one_back(tmp_path):
    seen, names, same = evaluated_weights(tmp_path, evaluate="global")
    assert same
    assert seen == [True] * 6 + [False] * 2
    assert names == ["join", *["lend", "return", "step"] * 3, "close"]


def test_a_failing_evaluation_of_the_global_model_leaves_the_own_one(tmp_path):
    callback = RecordingCallback(commits={1: 1.0}, evaluate="global")

    class Broken(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            raise ZeroDivisionError("oh")

    made = trainer(tmp_path, [callback, Broken()], eval_dataset=rows(4), eval_strategy="steps", eval_steps=2)
    with pytest.raises(ZeroDivisionError):
        made.train()
    assert callback.recorded.names[-2:] == ["return", "abort"]
    assert not torch.all(embedding(made.model) == 1.0)


# Words and figures


def test_figures_reach_logs_history_and_later_callbacks(tmp_path, monkeypatch):
    seen = []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    callback = RecordingCallback(commits={3: 1.0})
    made = fit(tmp_path, [Watch(), callback], logging_strategy="steps", logging_steps=4)
    assert [entry.get("gradientmail/round") for entry in seen] == [1.0, 1.0, 1.0]
    assert [entry.get("gradientmail/live_nodes") for entry in made.state.log_history] == [2.0, 2.0, 2.0]
    assert "loss" in seen[0] and "train_runtime" in seen[2]
    json.dumps(made.state.log_history)


def test_evaluations_are_logged_as_they_are(tmp_path):
    made = fit(tmp_path, RecordingCallback(), eval_dataset=rows(4), eval_strategy="steps", eval_steps=8)
    logged = next(entry for entry in made.state.log_history if "eval_loss" in entry)
    assert not any(name.startswith("gradientmail/") for name in logged)


def test_the_callback_comes_before_those_that_report(tmp_path, monkeypatch):
    """W&B, TensorBoard and the like stand before a user's own callbacks, where they would not see the figures."""

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            reported.append(logs.get("gradientmail/round"))

    reported = []
    monkeypatch.setattr(transformers.trainer, "get_reporting_integration_callbacks", lambda names: [Reporter])
    fit(tmp_path, RecordingCallback(commits={3: 1.0}), logging_strategy="steps", logging_steps=4)
    assert reported == [1.0, 1.0, 1.0]


def test_the_progress_bar_shows_the_run(tmp_path, capsys):
    bars = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            bars.extend(
                known.training_bar.postfix
                for known in made.callback_handler.callbacks
                if hasattr(known, "training_bar")
            )

    made = trainer(tmp_path, [RecordingCallback(commits={3: 1.0}), Watch()], disable_tqdm=False, max_steps=4)
    made.train()
    assert bars == [None, None, "round=1, nodes=2", "round=1, nodes=2"]


def test_waiting_is_told_in_one_line(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", False)
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", False)  # it is True where CI is set
    announce = Announcer()
    with caplog.at_level(logging.WARNING):
        announce(RunJoined(run="0123456789", node="a", step=3, rounds=2, live=("b",)))
        for _ in range(3):
            announce(RunWaited(reason="waiting for 1 more node"))
        announce(NodeGone(node="b", left=False))
    assert [record.message for record in caplog.records] == ["GradientMail: waiting for 1 more node"]


# Checkpoints


def saved(folder, callback=None, **options):
    callback = callback or RecordingCallback(commits={2: 1.0})
    return fit(folder, callback, save_strategy="steps", save_steps=4, **options)


def test_a_checkpoint_says_where_the_node_was(tmp_path):
    saved(tmp_path)
    content = json.loads(Path(tmp_path, "checkpoint-4", "gradientmail.json").read_text())
    assert content == {"node": "a", "global_step": 4, "rounds": 1, "session": {"steps": 4}, "stream": {}}
    assert not Path(tmp_path, "checkpoint-8", "gradientmail.json").exists()


def test_a_resumed_node_goes_on_as_itself(tmp_path):
    saved(tmp_path)
    made = trainer(tmp_path, RecordingCallback(node=None), llama(1))
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    callback = made.callback_handler.callbacks[1]
    assert callback._running_name == "a"
    assert callback.recorded.names == ["join", "step", "close"]
    assert callback.recorded.loaded == {"steps": 4}
    assert len(callback.recorded.samples) == 4


def callback_values(made):
    return made.callback_handler.callbacks[1].recorded.values()


def test_the_join_comes_after_the_restore(tmp_path):
    first = saved(tmp_path, RecordingCallback(), max_steps=4)
    callback = RecordingCallback()
    trainer(tmp_path, callback, llama(1), max_steps=4).train(resume_from_checkpoint=True)
    assert callback.sessions == []
    trainer(tmp_path, callback, llama(1), max_steps=6).train(resume_from_checkpoint=True)
    assert np.array_equal(callback.recorded.joined_with, callback_values(first))


def test_checkpoints_without_our_file_resume(tmp_path):
    fit(tmp_path, [], save_strategy="steps", save_steps=4)
    callback = RecordingCallback()
    made = trainer(tmp_path, callback, llama(1), save_strategy="steps", save_steps=4, max_steps=12)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert callback.recorded.names == ["join", "step", "close"]
    assert Path(tmp_path, "checkpoint-8", "gradientmail.json").exists()


def test_checkpoints_of_ours_resume_without_the_callback(tmp_path):
    saved(tmp_path)
    made = trainer(tmp_path, [], llama(1), restore_callback_states_from_checkpoint=True)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert made.state.global_step == 8


def test_the_state_the_trainer_restores_leaves_the_callback_in_place(tmp_path):
    saved(tmp_path)
    callback = RecordingCallback()
    made = trainer(tmp_path, callback, llama(1), restore_callback_states_from_checkpoint=True)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert made.callback_handler.callbacks[1] is callback
    assert len(callback.recorded.samples) == 4


# Parameters


def test_what_becomes_trainable_later_is_refused(tmp_path):
    class Unfreeze(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            embedding(kwargs["model"]).requires_grad_(True)

    model = llama()
    embedding(model).requires_grad_(False)
    callback = RecordingCallback()
    with pytest.raises(ConfigurationError, match=r"embed_tokens.weight became trainable after the run was joined"):
        fit(tmp_path, [callback, Unfreeze()], model, max_steps=12)
    assert len(callback.recorded.samples) == 8


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    model = llama().requires_grad_(False)
    model.enable_input_require_grads()
    with pytest.raises(ConfigurationError, match="no trainable parameters"):
        fit(tmp_path, RecordingCallback(), model)
