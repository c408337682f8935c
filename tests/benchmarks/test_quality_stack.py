"""Nodes trained as one computation: the same as in the plain loop, and only where they train alike."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.quality.plans import AVERAGING, MEAN, outer
from benchmarks.quality.stack import NODES_AT_ONCE, Stack, stacks
from benchmarks.quality.trial import Training, Trial
from gradientmail_core.algorithms.partition import ByBytes

SHORT = Trial(
    study="test", variant="short", nodes=2, steps=8, seed=0, sync_every=3, width=64, layers=2, context=8, batch=2,
    lr_warmup=4,
)  # fmt: skip
STARTED_APART = replace(SHORT, seed=1, sync_every=2, outer=AVERAGING, merge=MEAN)
ROUNDING = 2e-6
"""Parameters are below 1; rounding of the gradients is seen through AdamW, whose step is 3e-3 whatever their size."""


def parameters_after(trainings: list[Training]) -> list[NDArray[np.float32]]:
    found = []
    for node in (node for training in trainings for node in training.nodes):
        (layout,) = ByBytes().layouts(node.model.schema, 1)
        values = np.empty(layout.size, np.float32)
        node.model.read(layout, values)
        found.append(values)
    return found


def stacked(*trials: Trial) -> list[NDArray[np.float32]]:
    trainings = [Training(trial) for trial in trials]
    stack = Stack(trials[0], [node for training in trainings for node in training.nodes])
    for step in range(1, trials[0].steps + 1):
        stack.step()
        for training in trainings:
            training.after(step)
    return parameters_after(trainings)


def alone(trial: Trial) -> list[NDArray[np.float32]]:
    training = Training(trial)
    for step in range(1, trial.steps + 1):
        for node in training.nodes:
            node.step()
        training.after(step)
    return parameters_after([training])


def test_two_trials_in_a_stack_end_where_each_ends_in_the_plain_loop() -> None:
    together = stacked(SHORT, STARTED_APART)
    each = alone(SHORT) + alone(STARTED_APART)
    assert max(np.abs(ours - plain).max() for ours, plain in zip(together, each, strict=True)) < ROUNDING
    assert np.abs(each[0] - each[2]).max() > 0.01, "two trials that end alike would show nothing"


@pytest.mark.parametrize("change", [{"lr": 2e-3}, {"batch": 1}, {"steps": 24}, {"layers": 1}, {"lr_warmup": 5}])
def test_trials_that_train_otherwise_are_not_put_together(change: dict[str, int]) -> None:
    other = replace(SHORT, **change)  # type: ignore[arg-type]  # each is a field's own type
    assert list(stacks([SHORT, SHORT, other, SHORT])) == [[SHORT, SHORT], [other], [SHORT]]


def test_a_plan_is_cut_into_stacks_in_its_own_order() -> None:
    plan = list(outer())
    found = list(stacks(plan))
    assert [trial for together in found for trial in together] == plan
    assert max(sum(trial.nodes for trial in together) for together in found) == NODES_AT_ONCE
    assert list(stacks([replace(SHORT, nodes=40)])) == [[replace(SHORT, nodes=40)]]
