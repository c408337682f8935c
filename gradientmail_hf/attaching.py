"""How a callback comes to know its trainer, and to hear of what no event tells.

Events of the ``Trainer`` carry the model, the optimizer and the loader, but neither the trainer nor the batch; and
nothing is called when training ends by an exception. So the callback looks its trainer up among the callers of the
first event it gets, which is ``on_init_end`` where it was given to the constructor, and puts its own functions
around a few methods of that one object. No class is changed, and other trainers know nothing of it.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Final, TypeAlias, TypeVar

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback

from gradientmail_core.errors import ConfigurationError

T = TypeVar("T")
Method: TypeAlias = Callable[..., object]

_REFUSED: Final = {
    "DEEPSPEED": "DeepSpeed partitions the parameters and steps copies of its own, which undo what a merge writes",
    "MEGATRON_LM": "Megatron-LM cuts the model into parts that have neither the model's names nor its shapes",
}


@dataclass(frozen=True, slots=True)
class Caller:
    """The trainer that is calling, and the checkpoint it resumes from, if it says so there."""

    trainer: Trainer
    checkpoint: str | None


def caller_of(callback: TrainerCallback) -> Caller | None:
    """The nearest trainer up the stack that has ``callback`` among its callbacks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        trainer = names.get("self")
        if isinstance(trainer, Trainer) and any(known is callback for known in _callbacks(trainer)):
            checkpoint = names.get("resume_from_checkpoint")
            return Caller(trainer, checkpoint if isinstance(checkpoint, str) else None)
        frame = frame.f_back
    return None


def _callbacks(trainer: Trainer) -> list[TrainerCallback]:
    handler = getattr(trainer, "callback_handler", None)
    return handler.callbacks if handler is not None else []


def refuse_unusable(trainer: Trainer) -> None:
    """Raise :class:`ConfigurationError` where merged parameters could not be written into the model."""
    kind = getattr(trainer.accelerator.distributed_type, "name", "")
    if getattr(trainer, "is_deepspeed_enabled", False):
        kind = "DEEPSPEED"
    if kind in _REFUSED:
        raise ConfigurationError(f"{_REFUSED[kind]}.", "Train with DDP (torchrun) or FSDP2 inside a node.")


def place_early(trainer: Trainer, callback: TrainerCallback) -> None:
    """Put ``callback`` among the trainer's, right behind the one that decides what is logged and evaluated.

    There it steps before anything is logged, evaluated or saved, and what it adds to the logs is seen by all loggers.
    Raises :class:`ConfigurationError` if the trainer has another of its kind.
    """
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(other, type(callback)) and other is not callback for other in callbacks):
        raise ConfigurationError(
            f"The trainer has two {type(callback).__name__}s.", "A node is in one run: keep one of them."
        )
    if any(known is callback for known in callbacks):
        callbacks.remove(callback)
    flow = [index for index, known in enumerate(callbacks) if isinstance(known, DefaultFlowCallback)]
    callbacks.insert(flow[0] + 1 if flow else 0, callback)


def wrap(trainer: Trainer, name: str, around: Callable[[Method], Method]) -> None:
    """Put ``around(method)`` in the place of the trainer's method ``name``, on this trainer only, if it has it."""
    stock = getattr(trainer, name, None)
    if stock is not None:
        setattr(trainer, name, functools.wraps(stock)(around(stock)))
