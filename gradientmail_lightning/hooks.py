"""Where the strategy takes part in Lightning's loops: a callback that stands first among all callbacks.

First, because what a session writes into the model must be seen by everything else that happens at the
same point: weight averaging, checkpoints, validation. A callback rather than the strategy's own hooks,
because those run after all callbacks, and because Lightning's tuners put the callbacks aside: a search
for a learning rate then runs without joining, stepping or leaving the run.
"""

import os
import signal
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from gradientmail_lightning.strategy import GradientMailMixin

STATE_KEY = "gradientmail"


def _puts_average_in(callback: object, epoch: int) -> bool:
    """Whether ``callback`` is a ``StochasticWeightAveraging`` about to begin its last epoch."""
    measures = getattr(callback, "_model_contains_batch_norm", False)
    return bool(measures) and epoch == getattr(callback, "swa_end", -2) + 1


class SessionHooks:
    """Mixed into each namespace's ``Callback``; all it does is tell the strategy."""

    def __init__(self, strategy: "GradientMailMixin") -> None:
        self._strategy = strategy
        self._unnamed: list[ModelCheckpoint] = []

    @property
    def state_key(self) -> str:
        """Where this callback's state is found in a checkpoint."""
        return STATE_KEY

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Join: whatever restores a checkpoint has done so, the sanity check is over, training is certain."""
        self._strategy.begin_training(trainer)

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Leave the run before an average takes the model's place for an epoch that only measures its BatchNorm."""
        if any(_puts_average_in(callback, trainer.current_epoch) for callback in trainer.callbacks):  # type: ignore[attr-defined]  # set later
            self._strategy.leave_run()

    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: object, batch_idx: int
    ) -> None:
        """Look at the batch before the module may change it."""
        self._strategy.see_batch(batch, first=batch_idx == 0)

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: object, batch: object, batch_idx: int
    ) -> None:
        """One step of the session if an optimizer stepped in this batch, after all that uses its gradients."""
        self._strategy.finish_batch(trainer, pl_module, batch)

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Leave the run, before anything copies or saves the final model."""
        self._strategy.leave_run()

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Give the lease back at once; nothing half-trained is published.

        Lightning ends a process that was told to stop with exit code 0, as if it had finished; here it is 143.
        """
        if isinstance(exception, SystemExit) and exception.code is None and trainer.received_sigterm:
            exception.code = 128 + signal.SIGTERM
        self._strategy.abort_run(f"{type(exception).__name__}: {exception}".removesuffix(": "))

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Note which checkpoint directories are left to Lightning, which chooses them after this.

        What the node's last process handed off must be there before anything is restored.
        """
        callbacks = cast("list[ModelCheckpoint]", trainer.checkpoint_callbacks)
        self._unnamed = [callback for callback in callbacks if getattr(callback, "dirpath", "") is None]
        if stage == "fit":
            self._strategy.set_up_fit(trainer)

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Let nodes that share a disk write their checkpoints side by side, not over each other's."""
        for callback in self._unnamed if self._strategy.own_directories else ():
            callback.dirpath = os.path.join(callback.dirpath or "", self._strategy.node)

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Evaluate what the strategy was asked to; the sanity check comes before there is a run."""
        self._strategy.begin_evaluation(trainer)

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Before anything saves or compares the model."""
        self._strategy.end_evaluation()

    def on_test_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """As for validation."""
        self._strategy.begin_evaluation(trainer)

    def on_test_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """As for validation."""
        self._strategy.end_evaluation()

    def state_dict(self) -> dict[str, object]:
        """What this node needs to go on, how far the run was, and which node wrote it: plain types only."""
        return self._strategy.state()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Training goes on from ``state`` once the run is joined."""
        self._strategy.restore(state)
