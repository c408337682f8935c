"""Finding the trainer, taking a place among its callbacks, and refusing those that cannot work."""

import pytest
from accelerate.utils import DistributedType
from transformers import TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback

from gradientmail_core.errors import ConfigurationError
from gradientmail_hf.attaching import caller_of, place_early, refuse_unusable, wrap
from tests.hf.nodes import RecordingCallback, trainer


class Asks(TrainerCallback):
    """Looks for its caller in every event."""

    def __init__(self):
        self.found = {}

    def on_init_end(self, *args, **kwargs):
        self.found["made"] = caller_of(self)

    def on_train_begin(self, *args, **kwargs):
        self.found["trains"] = caller_of(self)


def test_the_trainer_is_found_where_it_calls(tmp_path):
    asks = Asks()
    made = trainer(tmp_path, asks, max_steps=2, save_strategy="steps", save_steps=1)
    assert asks.found["made"].trainer is made
    made.train()
    assert (asks.found["trains"].trainer, asks.found["trains"].checkpoint) == (made, None)
    again = trainer(tmp_path, asks, max_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert asks.found["trains"].trainer is again
    assert asks.found["trains"].checkpoint == str(tmp_path / "checkpoint-1")


def test_a_trainer_without_the_callback_is_none_of_its(tmp_path):
    mine, other = RecordingCallback(), trainer(tmp_path, [])

    class Calls(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            found.append(caller_of(mine))

    found = []
    other.add_callback(Calls())
    other.args.max_steps = 1
    other.train()
    assert found == [None]


def test_attaching_makes_the_callback_the_trainers(tmp_path):
    callback, made = RecordingCallback(), trainer(tmp_path, [])
    callback.attach(made)
    callback.attach(made)
    assert [known for known in made.callback_handler.callbacks if known is callback] == [callback]
    made.train()
    assert callback.recorded.names == ["join", "step", "close"]


def test_its_place_is_behind_the_flow(tmp_path):
    callback = RecordingCallback()
    made = trainer(tmp_path, [TrainerCallback(), callback])
    callbacks = made.callback_handler.callbacks
    assert isinstance(callbacks[0], DefaultFlowCallback)
    assert callbacks[1] is callback
    made.callback_handler.callbacks = [callbacks[2]]
    place_early(made, callback)
    assert made.callback_handler.callbacks == [callback, callbacks[2]]


def test_two_runs_at_once_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="two RecordingCallbacks"):
        trainer(tmp_path, [RecordingCallback(), RecordingCallback()])


def test_a_method_is_wrapped_for_one_trainer_only(tmp_path):
    made, other = trainer(tmp_path, []), trainer(tmp_path, [])
    wrap(made, "num_examples", lambda stock: lambda loader: stock(loader) + 1)
    wrap(made, "no_such_method", lambda stock: stock)
    loader = made.get_train_dataloader()
    assert (made.num_examples(loader), other.num_examples(loader)) == (33, 32)
    assert made.num_examples.__name__ == "num_examples"
    assert not hasattr(made, "no_such_method")


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_partitioned_models_are_refused_with_the_reason(tmp_path, kind, monkeypatch):
    made = trainer(tmp_path, [])
    refuse_unusable(made)
    monkeypatch.setattr(made.accelerator.state, "distributed_type", DistributedType[kind])
    with pytest.raises(ConfigurationError, match=r"(DeepSpeed partitions|Megatron-LM cuts).*DDP \(torchrun\) or FSDP2"):
        RecordingCallback().attach(made)


def test_deepspeed_is_refused_where_only_the_trainer_knows_of_it(tmp_path):
    made = trainer(tmp_path, [])
    made.is_deepspeed_enabled = True
    with pytest.raises(ConfigurationError, match="DeepSpeed"):
        RecordingCallback().attach(made)


def test_without_a_trainer_there_is_no_node():
    with pytest.raises(ConfigurationError, match="not called by a Trainer"):
        RecordingCallback().on_train_begin(None, None, None)
