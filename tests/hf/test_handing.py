"""A node that is killed and started elsewhere, with an empty folder, goes on with all it had.

What it had is compared, bit for bit, with a node that never stopped. One first life is a process of its own, ended by
SIGKILL as soon as a hand-off lies in the mailbox; the others end by an exception.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import TrainerCallback

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import HandedOff, RunResumed, StateOmitted
from gradientmail_hf import GradientMailCallback
from tests.handing import ALONE, Handover, await_the_end, killed
from tests.hf.nodes import Sized, Stream, fit, llama

EVERY, STEPS = 6, 20


def node(folder: Path, **options: Any) -> GradientMailCallback:
    settings: dict[str, Any] = {"node": "a", "handoff_every": EVERY, "algorithm": ALONE, "callbacks": ()}
    return GradientMailCallback((folder / "run").as_uri(), **{**settings, **options})


def dropping(seed: int) -> Any:
    """A model that draws random numbers as it trains."""
    return llama(seed, attention_dropout=0.5)


class Wait(TrainerCallback):
    """Ends a training once its hand-off lies in the mailbox, one step later."""

    def __init__(self, end: Any) -> None:
        self.end, self.handover = end, Handover()
        self.heard = self.handover.heard

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step > EVERY:
            self.handover.wait()
            self.end()


def first_life(folder: str) -> None:
    """Train until the first hand-off is in the mailbox, say so, and wait to be killed."""
    wait = Wait(await_the_end)
    fit(folder, [node(Path(folder), callbacks=[wait.heard]), wait], dropping(0), max_steps=STEPS)


def same(one: Any, other: Any) -> bool:
    states = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in states)


def test_killed_and_started_elsewhere_with_an_empty_folder_a_node_ends_on_the_bits_of_one_that_never_stopped(tmp_path):
    program = f"from tests.hf.test_handing import first_life; first_life({str(tmp_path / 'broken')!r})"
    with killed(program):
        straight = fit(tmp_path / "whole", node(tmp_path / "whole"), dropping(0), max_steps=STEPS)

    events: list[Any] = []
    again = fit(tmp_path / "empty", node(tmp_path / "broken", callbacks=[events.append]), dropping(99), max_steps=STEPS)
    assert [event.step for event in events if isinstance(event, RunResumed)] == [EVERY]
    assert again.read == straight.read[EVERY:], "its place in the data"
    assert same(straight, again)
    assert again.state.global_step == STEPS
    assert again.lr_scheduler.state_dict() == straight.lr_scheduler.state_dict()
    assert not [event for event in events if isinstance(event, StateOmitted)]


def adapted(seed: int) -> Any:
    """A frozen model, the same for every seed, with an adapter to train."""
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(0), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(seed)
    torch.manual_seed(seed)
    return model


@pytest.mark.parametrize(
    ("model", "data", "settings"),
    [
        (adapted, None, ALONE),
        (dropping, None, replace(ALONE, global_batch_size=3)),
        (dropping, lambda: Sized(32), ALONE),
        (dropping, Stream, ALONE),
    ],
    ids=["adapter", "share", "sized stream", "stream"],
)
def test_whatever_is_trained_and_read_goes_on_there(tmp_path, model, data, settings):
    def train(folder: Path, seed: int, *more: Any, **options: Any) -> Any:
        callback = node(folder, algorithm=settings, **options)
        return fit(tmp_path, [callback, *more], model(seed), data() if data is not None else None, max_steps=STEPS)

    def fail() -> None:
        raise ZeroDivisionError("the machine is gone")

    straight, wait, handed = train(tmp_path / "whole", 0), Wait(fail), list[Any]()
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "broken", 0, wait, callbacks=[wait.heard, handed.append])
    again = train(tmp_path / "broken", 7)
    assert again.read == straight.read[EVERY:]
    assert same(straight, again)
    sizes = [event.size for event in handed if isinstance(event, HandedOff)]
    assert all((size < 20_000) is (model is adapted) for size in sizes), "a frozen model stays behind"


def test_what_cannot_be_handed_off_is_said(tmp_path):
    told: list[Any] = []
    options = {
        "ignore_data_skip": True,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
    }
    data = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)}] * 4
    fit(tmp_path, node(tmp_path, callbacks=[told.append]), eval_dataset=data, **options)
    assert {event.part for event in told if isinstance(event, StateOmitted)} == {
        "the best checkpoint",
        "the place in the data",
    }


def test_a_checkpoint_that_is_named_comes_before_a_hand_off_and_so_does_what_a_process_holds(tmp_path):
    callback = node(tmp_path, follow_run=False)
    made = fit(tmp_path, callback, save_strategy="steps", save_steps=3)
    assert len(made.read) == 8
    made.train()
    assert len(made.read) == 16, "a second training in one process is a training of its own"
    again = fit(tmp_path / "other", node(tmp_path, follow_run=False), max_steps=0, num_train_epochs=0)
    again.args.max_steps = 8
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(again.read) == 5


def test_a_hand_off_needs_a_name():
    with pytest.raises(ConfigurationError, match="node's name"):
        GradientMailCallback("file:///there", handoff_every=5)
    with pytest.raises(ConfigurationError, match="handoff_every is 0"):
        GradientMailCallback("file:///there", handoff_every=0, node="a")
