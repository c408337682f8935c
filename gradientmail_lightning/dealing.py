"""Train loaders whose samples all nodes of the run share (see :mod:`gradientmail_core.adapters.torch_queue`).

Lightning asks for the first batches before training starts, so such a loader lets the run be joined when it is first
asked: checkpoints are restored by then, and the sanity check is over. It has no length, because nobody knows how much
of a pass this node will read; Lightning then looks one batch ahead, and knows the last one when it comes. Where epochs
are not cut short, one epoch is one pass, and a node that joins late goes on in the epoch of the others.

The leading process draws for all processes of the node, and says so to them before each batch. So all of them have as
many batches, and the pass ends on all of them at once.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

from gradientmail_core.adapters.torch_queue import SharedQueueDataset, dealt, is_shuffled, portion
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.patterns.shared_passes import SharedPasses
from gradientmail_lightning.following import follow_epochs
from gradientmail_lightning.interrupts import interruptible_waits

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from gradientmail_lightning.strategy import GradientMailMixin


class Dealing:
    """The shared datasets of one fit, as ``strategy`` is dealt their samples."""

    def __init__(self, strategy: "GradientMailMixin") -> None:
        self._strategy = strategy
        self._names: list[str] = []
        self._complete = False
        self._passes: dict[str, SharedPasses] = {}
        self._newest = 0
        self._saved: Mapping[str, object] = {}

    def begin(self) -> None:
        """A fit begins: nothing of an earlier one goes on."""
        self._names, self._passes, self._newest = [], {}, 0

    def taken(self, loader: DataLoader[object]) -> DataLoader[object]:
        """A copy of ``loader``, the loader of a shared dataset, that reads what this node is dealt.

        Raises :class:`ConfigurationError` where that cannot be.
        """
        data = loader.dataset
        assert isinstance(data, SharedQueueDataset)
        if self._complete:
            self._names, self._complete = [], False
        if data.name in self._names:
            raise ConfigurationError(
                f"Two train loaders share the samples of {data.name!r}.",
                "Give each SharedQueueDataset of a run a name= of its own.",
            )
        if not isinstance(self._strategy.algorithm, DiLoCo):
            raise ConfigurationError(
                "A gossip run deals no samples.", "Give the dataset itself to the loader, or train with DiLoCo."
            )
        self._names.append(data.name)
        draw = partial(self._draw, data, is_shuffled(loader), loader.drop_last)
        return dealt(loader, draw, partial(self._begin_pass, data), self._strategy.share)

    def follow(self, trainer: "Trainer") -> None:
        """Training begins: let the trainer's epoch be the pass that it reads.

        Not before, because only then has a trainer that was restored from the end of an epoch counted that one.
        """
        if _whole(trainer) and self._strategy.follows_run:
            follow_epochs(trainer, self._newest)

    def confirm(self) -> None:
        """A batch was trained on."""
        self._complete = True
        for passes in self._passes.values():
            passes.confirm()

    def state(self) -> dict[str, object]:
        """How far the samples in this node's hands were trained on, for a checkpoint."""
        return {name: passes.state_dict() for name, passes in self._passes.items()}

    def restore(self, state: Mapping[str, object]) -> None:
        """Let the next fit go on from ``state``."""
        self._saved = state

    def _begin_pass(self, data: SharedQueueDataset[object]) -> bool:
        """Go on in the data, or begin the next pass; False where no run is joined, and none to be."""
        trainer = self._strategy.lightning_module.trainer if self._strategy.lightning_module is not None else None
        if trainer is None or not self._strategy.enter_early(trainer):
            return False
        processes = self._strategy.processes
        assert processes is not None
        epoch = trainer.current_epoch if _whole(trainer) else 0
        self._newest = max(self._newest, processes.run(partial(self._began, data, epoch)))
        return True

    def _began(self, data: SharedQueueDataset[object], epoch: int) -> int:
        with interruptible_waits():
            if data.name not in self._passes:
                self._passes[data.name] = self._joined(data)
            self._passes[data.name].begin(epoch)
        return self._passes[data.name].number

    def _joined(self, data: SharedQueueDataset[object]) -> SharedPasses:
        session = self._strategy.session
        assert session is not None
        passes = session.shared_passes(len(data), name=data.name, block=data.block)
        saved = self._saved.get(data.name)
        if isinstance(saved, dict):
            passes.load_state_dict(saved)
        return passes

    def _draw(self, data: SharedQueueDataset[object], shuffled: bool, whole_only: bool, size: int) -> list[int]:
        processes, (part, parts) = self._strategy.processes, self._strategy.replica
        if processes is None:
            return []
        return portion(processes.numbers(lambda: self._drawn(data, shuffled, whole_only, size * parts)), part, parts)

    def _drawn(self, data: SharedQueueDataset[object], shuffled: bool, whole_only: bool, count: int) -> list[int]:
        passes = self._passes[data.name]
        with interruptible_waits():
            units = passes.draw(count)
        if units and whole_only and len(units) < count:
            passes.drop_last()
            return []
        return [int(data.order(unit.number, shuffled=shuffled)[unit.unit]) for unit in units]


def _whole(trainer: "Trainer") -> bool:
    """Whether an epoch is one pass over the data."""
    return isinstance(trainer.limit_train_batches, float) and trainer.limit_train_batches == 1.0
