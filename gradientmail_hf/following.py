"""Bringing a trainer to where its run is, so that a node that joins late ends with the others.

Without this a late node begins its own count: it warms up a learning rate that the others have long decayed, and
trains for ``max_steps`` more. So a trainer that is behind the run is moved forward: its ``global_step``, the learning
rate schedule, and its epoch, as if it had resumed from a checkpoint of that step. It is never moved back, and ends
with the step in which the run does, also where ``num_train_epochs`` says how long that is.

Where indices can be skipped for nothing, the epoch is entered at the run's place in it, so that epochs end where
they do on the other nodes and a later checkpoint tells the place in the data. An ``IterableDataset`` would have to be
read through for that: it is read from its beginning, and moved by whole epochs only.

A schedule that is stepped by a metric (``ReduceLROnPlateau``) stays this node's own: it has not seen the metrics.
"""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from gradientmail_hf.data import base_of, batches_behind, steps_per_epoch


@dataclass(frozen=True, slots=True)
class Place:
    """An epoch, counted from 0, and how many of its batches lie behind."""

    epoch: int
    batches: int


@dataclass(frozen=True, slots=True)
class Followed:
    """By how many steps a trainer was moved, and where in its epochs it goes on; None where these have no length."""

    steps: int
    place: Place | None


def follow(trainer: Trainer, loader: object, step: int) -> Followed | None:
    """Move ``trainer``, which is about to train on ``loader``, to the run's optimizer step ``step``.

    None if it is there already: nothing was changed then.
    """
    state = trainer.state
    behind = step - state.global_step
    if behind <= 0:
        return None
    state.global_step = step
    # The trainer divides losses and times by the steps since these two.
    vars(trainer).update(_globalstep_last_logged=step, _initial_global_step=step)
    scheduler = trainer.lr_scheduler
    if scheduler is not None and "metrics" not in inspect.signature(scheduler.step).parameters:
        _advance(scheduler, behind)
    accumulated = trainer.args.gradient_accumulation_steps
    epoch = steps_per_epoch(loader, accumulated)
    if epoch is not None:
        state.epoch = step / epoch
    return Followed(behind, place_at(loader, step, accumulated))


def resumed(trainer: Trainer, loader: object, step: int) -> Followed:
    """Let ``trainer`` train on ``loader`` as if it had resumed from a checkpoint of ``step``.

    Its schedule is set already. What can only be skipped by reading it is read, as the Trainer does when it resumes.
    """
    vars(trainer).update(_globalstep_last_logged=step, _initial_global_step=step)
    accumulated = trainer.args.gradient_accumulation_steps
    epoch = steps_per_epoch(loader, accumulated)
    trainer.state.epoch = step / epoch if epoch is not None else 0
    return Followed(0, Place(step // epoch if epoch is not None else 0, batches_behind(loader, step, accumulated)))


def entered(call: Mapping[str, object], followed: Followed, output: str | None) -> dict[str, object]:
    """The arguments of the Trainer's ``_run_epoch``, moved to where ``followed`` says; ``output`` is its directory.

    Called without a checkpoint, it is given the name of one that does not exist: then it skips batches and restores
    nothing.
    """
    place, number, first = followed.place, call.get("epoch"), call.get("epochs_trained")
    if place is None or not isinstance(number, int) or not isinstance(first, int):
        return dict(call)
    moved = {**call, "epoch": number - first + place.epoch, "epochs_trained": place.epoch}
    if number == first:
        checkpoint = call.get("resume_from_checkpoint") or str(Path(output or ".", "no-checkpoint"))
        moved |= {"resume_from_checkpoint": checkpoint, "steps_trained_in_current_epoch": place.batches}
    return moved


def _advance(scheduler: LRScheduler, steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            scheduler.step()


def place_at(loader: object, step: int, accumulated: int) -> Place | None:
    """Where a trainer stands in its epochs after ``step`` optimizer steps; None where they have no length.

    What can only be skipped by reading it, or not at all, counts as unread.
    """
    epoch = steps_per_epoch(loader, accumulated)
    if epoch is None:
        return None
    base = base_of(loader)
    streamed = not isinstance(base, DataLoader) or isinstance(base.dataset, IterableDataset)
    skips = not streamed and getattr(base, "batch_sampler", None) is not None
    return Place(step // epoch, batches_behind(loader, step, accumulated) if skips else 0)
