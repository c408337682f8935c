"""What an alignment leaves in the model, which steps are claimed again, and deltas of models that round."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.algorithms.alignment import Adaptive, Alignment, Blend, Carry, Eager, Kept, Overwrite
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.outer import SGD, Nesterov
from gradientmail_core.engine.aligning import REBASES_MOST, Aligner, Outcome, Policy
from gradientmail_core.sim.world import ToyModel
from gradientmail_core.tensors.codec_float import round_to_bf16, widen_bf16
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout
from tests.core.engine.parts import SETTINGS, run_of
from tests.core.engine.test_learner import Bench, committed

LAYOUT = run_of(replace(SETTINGS, fragments=1)).layouts[0]


class HalfModel(ToyModel):
    """A toy model that keeps bf16."""

    def write(self, layout: FragmentLayout, values: Flat) -> None:
        patterns = np.empty(values.size, np.uint16)
        round_to_bf16(np.ascontiguousarray(values), patterns)
        rounded = np.empty_like(values)
        widen_bf16(patterns, rounded)
        super().write(layout, rounded)


def full(value: float) -> Flat:
    return np.full(LAYOUT.size, value, np.float32)


class Node:
    """An aligner and its model, moved by hand."""

    def __init__(self, policy: Policy, model: ToyModel | None = None, theta: float = 1.0) -> None:
        self.model = model or ToyModel()
        self.aligner = Aligner(self.model, LAYOUT, full(theta), policy)

    def train(self, move: float) -> None:
        for values in self.model.values.values():
            values += np.float32(move)

    def publish(self, version: int = 0) -> Flat:
        values = self.read()
        self.aligner.taken(values, version)
        return values

    def arrive(self, theta: float, *, merged: bool = True, cosine: float | None = None, **more: Any) -> Kept:
        return self.aligner.arrived(full(theta), merged=merged, cosine=cosine, **more)

    def read(self) -> Flat:
        values = np.empty(LAYOUT.size, np.float32)
        self.model.read(LAYOUT, values)
        return values

    @property
    def value(self) -> float:
        values = self.read()
        assert (values == values[0]).all()
        return float(values[0])


@pytest.mark.parametrize(
    ("alignment", "merged", "rebase", "value", "kept"),
    [
        (Overwrite(), True, False, 5.0, Kept.NOTHING),
        (Overwrite(), False, False, 5.0, Kept.NOTHING),
        (Overwrite(), False, True, 5.0 + 0.75, Kept.EVERYTHING),
        (Overwrite(), True, True, 5.0, Kept.NOTHING),
        (Blend(0.5), True, False, (5.0 + 1.75) / 2, Kept.NOTHING),
        (Carry(), True, False, 5.0 + 0.25, Kept.SINCE_SNAPSHOT),
        (Carry(), False, False, 5.0, Kept.NOTHING),
        (Carry(), False, True, 5.0 + 0.75, Kept.EVERYTHING),
        (Adaptive(), True, False, 5.0, Kept.NOTHING),
        (Eager(), True, False, 5.0 + 0.25, Kept.SINCE_SNAPSHOT),
    ],
)
def test_a_commit_meets_a_model_that_trained_on(
    alignment: Alignment, merged: bool, rebase: bool, value: float, kept: Kept
) -> None:
    node = Node(Policy(alignment, rebase))
    node.train(0.5)
    node.publish()
    node.train(0.25)
    assert node.arrive(5.0, merged=merged) is kept
    assert node.value == value
    assert (node.aligner.base == 5.0).all() and (node.aligner.held == 5.0).all()
    node.aligner.settle()
    assert node.value == 5.0


def test_what_was_refused_for_its_values_is_not_kept() -> None:
    for alignment in (Overwrite(), Blend(0.5), Carry()):
        node = Node(Policy(alignment, rebase=True))
        node.train(np.nan)
        node.publish()
        assert node.arrive(5.0, merged=False, spoilt=True) is Kept.NOTHING
        assert node.value == 5.0


def test_a_node_rebases_three_times_in_a_row_at_most() -> None:
    node = Node(Policy(rebase=True))
    outcomes = []
    for version in range(REBASES_MOST + 2):
        node.train(0.5)
        outcomes.append(node.arrive(float(version), merged=False))
    assert outcomes == [Kept.EVERYTHING] * REBASES_MOST + [Kept.NOTHING, Kept.EVERYTHING]
    assert node.value == REBASES_MOST + 1 + 0.5


def test_carrying_turns_on_when_nodes_agree_and_off_when_they_do_not() -> None:
    node = Node(Policy(Adaptive(high=0.6, low=0.4)))
    carried = []
    for cosine in (0.5, 0.7, 0.5, 0.3, None):
        node.publish()
        node.train(0.25)
        carried.append(node.arrive(1.0, cosine=cosine) is Kept.SINCE_SNAPSHOT)
    assert carried == [False, True, True, False, False]


def test_an_eager_node_steps_ahead_and_is_corrected() -> None:
    node = Node(Policy(Eager(), outer=SGD(0.5)))
    node.train(-1.0)
    node.publish()
    assert node.value == 0.0, "nothing is known of a round before: no step"
    node.arrive(0.5, outcome=Outcome((), full(2.0), 0.25, 4))
    node.train(-2.0)
    node.publish(1)
    own, own_last, merged_last, weight = 2.0, 1.0, 2.0, 0.25
    assert node.value == pytest.approx(0.5 - 0.5 * (merged_last + weight * (own - own_last)))
    node.train(-0.25)
    node.arrive(-3.0)
    assert node.value == pytest.approx(-3.25)


def test_an_eager_step_is_undone_where_the_snapshot_was_not_merged() -> None:
    node = Node(Policy(Eager(), rebase=True, outer=SGD(0.5)))
    node.publish()
    node.arrive(1.0, outcome=Outcome((), full(2.0), 0.25, 4))
    node.train(-2.0)
    node.publish(1)
    assert node.value != -1.0
    node.train(-0.25)
    assert node.arrive(3.0, merged=False) is Kept.EVERYTHING
    assert node.value == pytest.approx(3.0 - 2.25)


@pytest.mark.parametrize("rebase", [False, True])
@pytest.mark.parametrize("alignment", [Overwrite(), Blend(0.5), Carry(), Adaptive(), Eager()])
def test_merged_buffers_are_taken_as_committed(alignment: Alignment, rebase: bool) -> None:
    """This node's variance fell by 40 since its snapshot; the run's mean is 10, and must not become -30."""
    pieces = (replace(LAYOUT.pieces[0], role="buffer"), *LAYOUT.pieces[1:])
    layout, count = replace(LAYOUT, pieces=pieces), pieces[0].elements
    model = ToyModel()
    aligner = Aligner(model, layout, full(50.0), Policy(alignment, rebase, SGD(2.0)))
    values = np.empty(layout.size, np.float32)
    for version, merged in enumerate((True, True, False)):
        model.read(layout, values)
        aligner.taken(values, version)
        model.read(layout, values)
        assert (values[:count] == (50.0 if version == 0 else 10.0)).all(), "nobody guesses a statistic"
        model.poison(10.0 if version == 0 else 0.5)
        aligner.arrived(full(10.0), merged=merged, cosine=0.9, outcome=Outcome((), full(100.0), 0.5, 2))
        model.read(layout, values)
        assert (values[:count] == 10.0).all()


def test_a_rolled_back_fragment_carries_nothing() -> None:
    node = Node(Policy(Carry()))
    node.train(0.5)
    node.publish()
    node.aligner.forget()
    assert node.value == 1.0
    assert node.arrive(5.0) is Kept.NOTHING and node.value == 5.0


def test_a_model_that_rounds_claims_no_delta_that_it_did_not_train() -> None:
    node = Node(Policy(), HalfModel(), theta=1.0 - 1e-3)
    assert (node.aligner.base == np.float32(1.0 - 1e-3)).all()
    assert (node.aligner.held - node.read() == 0.0).all() and node.value != np.float32(1.0 - 1e-3)
    node.train(-0.25)
    node.arrive(1.0 - 2e-3)
    assert (node.aligner.held - node.read() == 0.0).all()
    assert (Node(Policy(Carry()), HalfModel()).aligner.held == 1.0).all()


def test_a_resumed_fragment_keeps_what_was_trained_and_knows_its_base() -> None:
    for model in (ToyModel(fill=0.5), HalfModel(fill=0.5)):
        aligner = Aligner(model, LAYOUT, full(1.0 - 1e-3), Policy(), keep=True)
        values = np.empty(LAYOUT.size, np.float32)
        model.read(LAYOUT, values)
        assert (values == 0.5).all() and (aligner.base == np.float32(1.0 - 1e-3)).all()


# -- counters ----------------------------------------------------------------------------------------------


def claims(policy: Policy, *, merged: bool) -> tuple[int, int]:
    """Steps and tokens that the second snapshot of a fragment claims: 20 to the first, 3 until its commit, 7 more."""
    bench = Bench(run=run_of(replace(SETTINGS, fragments=1)), policy=policy)
    bench.train(23)
    commit = bench.commit_of(committed(bench.learner.state, 0, bench.run, due=30, newest_step=20), 1.0)
    bench.learner.deliver(replace(commit, merged=merged))
    bench.train(7)
    return bench.snapshots[-1].steps, bench.snapshots[-1].tokens


def test_counters_follow_what_was_kept() -> None:
    assert claims(Policy(), merged=True) == (6, 48)
    assert claims(Policy(Blend(0.5)), merged=True) == (6, 48)
    assert claims(Policy(Carry()), merged=True) == (10, 80)
    assert claims(Policy(Carry()), merged=False) == (6, 48)
    assert claims(Policy(rebase=True), merged=False) == (30, 240)


def test_deltas_are_against_the_committed_head_whatever_was_carried() -> None:
    bench = Bench(run=run_of(replace(SETTINGS, fragments=1)), policy=Policy(Carry()))
    bench.train(23)
    commit = bench.commit_of(committed(bench.learner.state, 0, bench.run, due=30, newest_step=20), 5.0)
    bench.learner.deliver(commit)
    bench.train(7)
    snapshot = bench.snapshots[-1]
    assert snapshot.base is commit.theta
    assert (snapshot.base - snapshot.values == 10 * 0.125).all(), "ten steps, claimed as ten"


def test_a_policy_comes_from_the_settings() -> None:
    settings = DiLoCo(alignment=Overwrite(), stale="reject", outer=SGD(0.5))
    assert Policy.of(settings) == Policy(Overwrite(), False, SGD(0.5))
    assert Policy.of(DiLoCo()) == Policy(Carry(), True, Nesterov())
    assert Policy.of(DiLoCo.eager()).needs_outer and not Policy.of(DiLoCo()).needs_outer
