"""A training's whole state in the run's mailbox, for a process that starts under the same name without a checkpoint.

Kept are what trains of the model, the optimizer, the schedule, the scaler, how far the ``Trainer`` was, the place in
the data, and the state of Python's, numpy's and torch's generators. It is taken after a step, when the ``Trainer`` has
moved its schedule on and forgotten the gradients, and set when the run is joined; the generators once more with the
first batch, when all that is drawn between two processes is drawn.

A checkpoint that is resumed from comes before it: what somebody names comes before what lies there. And once this
process has taken a step, a later training goes on from what it holds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast

from accelerate.data_loader import SeedableRandomSampler
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers import Trainer

from gradientmail_core.adapters.torch_handoff import Stateful, TorchHandoff, given, set_random_state
from gradientmail_core.protocol.belongings import Belongings
from gradientmail_hf.data import base_of, sampler_of

_COUNTED: Final = ("global_step", "num_input_tokens_seen", "total_flos", "log_history")

Position = Mapping[str, object]
"""Where a stream stands; empty where batches are counted instead."""


@dataclass(frozen=True, slots=True)
class Restored:
    """How far the last process of this node was, and where its stream stood."""

    step: int
    stream: Position


class TrainerHandoff:
    """What ``Session(handoff=...)`` keeps of ``trainer``; ``stream`` tells where its stream stands.

    With ``declined`` nothing is gone on from.
    """

    def __init__(
        self, trainer: Trainer, model: nn.Module, optimizer: object, stream: Callable[[], Position], *, declined: bool
    ) -> None:
        self._trainer = trainer
        self._stream = stream
        self._declined = declined
        self._random: object = None
        self.omitted: dict[str, str] = {}
        self.restored: Restored | None = None
        bare = getattr(optimizer, "optimizer", optimizer)
        parts = {"scheduler": trainer.lr_scheduler, "scaler": getattr(trainer.accelerator, "scaler", None)}
        others = {name: cast(Stateful, part) for name, part in parts.items() if part is not None}
        self._parts = TorchHandoff(model, cast(Optimizer, bare), trainer=self, **others)
        if trainer.args.load_best_model_at_end:
            self.omitted["the best checkpoint"] = "its files are on the machine that wrote them"

    def save(self) -> Belongings:
        """A copy of everything."""
        return self._parts.save()

    def load(self, belongings: Belongings) -> bool:
        """Go on from it, unless something else comes before it."""
        if self._declined:
            return False
        self._parts.load(belongings)
        self._random = given(belongings.plain["random"], belongings.arrays)
        return True

    def go_on(self) -> None:
        """The first batch is about to be trained on: draw what the last process would have drawn."""
        state, self._random = self._random, None
        if state is not None:
            set_random_state(state)

    def state_dict(self) -> dict[str, object]:
        """How far the trainer is."""
        state = self._trainer.state
        return {**{name: getattr(state, name) for name in _COUNTED}, "stream": dict(self._stream())}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Set the trainer's counters."""
        vars(self._trainer.state).update({name: state_dict[name] for name in _COUNTED})
        vars(self._trainer)["_initial_num_input_tokens_seen"] = self._trainer.state.num_input_tokens_seen
        self.restored = Restored(self._trainer.state.global_step, cast(Position, state_dict["stream"]))

    def note_data(self, loader: object, *, streamed: bool) -> None:
        """Note what cannot be told of the place in the data of ``loader``."""
        if not streamed and self._trainer.args.ignore_data_skip:
            self.omitted["the place in the data"] = "ignore_data_skip begins each process at the start of an epoch"
        elif not streamed and (reason := _why_unordered(loader)) is not None:
            self.omitted["the order of the data"] = reason


def _why_unordered(loader: object) -> str | None:
    """Why the order of an epoch cannot be found again; None if it can, or if the dataset decides it."""
    base = base_of(loader)
    if not isinstance(base, DataLoader):
        return f"its loader is a {type(base).__name__}"
    if isinstance(base.dataset, IterableDataset):
        return None
    sampler = sampler_of(base)
    if isinstance(sampler, SequentialSampler | SeedableRandomSampler):
        return None
    return f"its {type(sampler).__name__} draws another one in each process"
