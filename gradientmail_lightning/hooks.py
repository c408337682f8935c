"""Where the strategy takes part in Lightning's loops: a callback that stands first among all callbacks.

First, because what a session writes into the model must be seen by everything else that happens at the
same point: weight averaging, checkpoints, validation. A callback rather than the strategy's own hooks,
because those run after all callbacks, and because Lightning's tuners put the callbacks aside: a search
for a learning rate then runs without joining, stepping or leaving the run.
"""

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from gradientmail_lightning.strategy import GradientMailMixin

STATE_KEY = "gradientmail"


class SessionHooks:
    """Mixed into each namespace's ``Callback``; all it does is tell the strategy."""

    def __init__(self, strategy: "GradientMailMixin") -> None:
        self._strategy = strategy

    @property
    def state_key(self) -> str:
        """Where this callback's state is found in a checkpoint."""
        return STATE_KEY

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Join: whatever restores a checkpoint has done so, the sanity check is over, training is certain."""
        self._strategy.enter_run(trainer)

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

    def state_dict(self) -> dict[str, object]:
        """Which node wrote the checkpoint, and how far the run was: plain types only."""
        return self._strategy.progress()
