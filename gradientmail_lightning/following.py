"""Bringing a trainer to where its run is, so that a node that joins late ends with the others.

Without this a late node begins its own count: it warms up a learning rate that the others have long decayed, and
trains for ``max_steps`` more. So a trainer that is behind the run is moved forward: its ``global_step`` and its epoch,
the batches its loggers count, and the learning rate schedules that Lightning steps. It is never moved back.

Epochs are whole ones, so a node may train up to an epoch longer than the others where only ``max_epochs`` ends the
training; a schedule of limited length (``OneCycleLR``) is then moved no further than leaves steps for that.
"""

import math
import warnings
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import ReduceLROnPlateau

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.types import LRSchedulerConfig


def follow(trainer: "Trainer", step: int) -> int:
    """Move ``trainer`` to the run's optimizer step ``step``; by how many steps it was behind (0: left alone).

    In manual optimization each optimizer is taken to step once for each of the run's steps, and schedules are left
    alone, because the module steps them itself.
    """
    automatic = trainer.lightning_module.automatic_optimization
    each = 1 if automatic else max(1, len(trainer.optimizers))
    before = trainer.global_step // each
    behind = step - before
    if behind <= 0:
        return 0
    _advance_steps(trainer, behind * each, automatic)
    epochs = _advance_epochs(trainer, behind)
    if automatic:
        for config in trainer.lr_scheduler_configs:
            _advance_schedule(trainer, config, before, behind, epochs)
    return behind


def follow_epochs(trainer: "Trainer", epoch: int) -> None:
    """Move ``trainer`` on to ``epoch``, where the data themselves tell which epoch the run is in."""
    epochs = epoch - trainer.current_epoch
    if epochs <= 0:
        return
    _count_epochs(trainer, epochs)
    for config in trainer.lr_scheduler_configs if trainer.lightning_module.automatic_optimization else ():
        if config.interval == "epoch":
            _advance_schedule(trainer, config, 0, 0, epochs)


def _advance_steps(trainer: "Trainer", steps: int, automatic: bool) -> None:
    loop = trainer.fit_loop.epoch_loop
    if automatic:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    progress.total.ready += steps
    progress.total.completed += steps
    loop._batches_that_stepped += steps


def _steps_per_epoch(trainer: "Trainer") -> int | None:
    batches = trainer.num_training_batches
    return None if batches == math.inf else math.ceil(batches / trainer.accumulate_grad_batches)


def _advance_epochs(trainer: "Trainer", steps: int) -> int:
    per_epoch = _steps_per_epoch(trainer)
    epochs = steps // per_epoch if per_epoch else 0
    _count_epochs(trainer, epochs)
    return epochs


def _count_epochs(trainer: "Trainer", epochs: int) -> None:
    progress = trainer.fit_loop.epoch_progress
    for count in (progress.total, progress.current):
        for stage, so_far in vars(count).items():
            setattr(count, stage, so_far + epochs)


def _advance_schedule(trainer: "Trainer", config: "LRSchedulerConfig", before: int, behind: int, epochs: int) -> None:
    scheduler = config.scheduler
    if isinstance(scheduler, ReduceLROnPlateau):
        return
    if config.interval == "step":
        count = (before + behind) // config.frequency - before // config.frequency
    else:
        count = epochs // config.frequency
    length = getattr(scheduler, "total_steps", None)
    if isinstance(length, int):
        count = min(count, length - scheduler.last_epoch - _steps_to_come(trainer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(count):
            scheduler.step()


def _steps_to_come(trainer: "Trainer") -> int:
    per_epoch, epochs = _steps_per_epoch(trainer), trainer.max_epochs
    by_steps = trainer.max_steps - trainer.global_step if trainer.max_steps != -1 else math.inf
    by_epochs = (epochs - trainer.current_epoch) * per_epoch if per_epoch and epochs and epochs > 0 else math.inf
    steps = min(by_steps, by_epochs)
    return 0 if steps == math.inf else max(0, int(steps))
