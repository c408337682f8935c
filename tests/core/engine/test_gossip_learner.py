"""The training thread's side of a gossip node, without an engine."""

from dataclasses import replace

import numpy as np
import pytest

from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.algorithms.mixing import All, Pair
from gradientmail_core.algorithms.outer import SGD, HeavyBall, Nesterov
from gradientmail_core.engine.gossip_learner import (
    Answer,
    GossipLearner,
    GossipState,
    Mean,
    Mixed,
    Rejoin,
    Renumber,
    Unmixed,
    is_over,
)
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.sim.world import ToyModel
from gradientmail_core.tensors.schema import Schema

WAITING = FactoredGossip(sync_every=3, fragments=2, mix2=All(), outer=SGD(1.0))
FREE = replace(WAITING, mix2=FactoredGossip().mix2)


class Bench:
    """A learner on a toy model whose values the test moves, and all it said."""

    def __init__(self, settings=WAITING, model=None, round=0):
        self.model = model or ToyModel(tensors=4, elements=4)
        self.layouts = settings.partition.layouts(self.model.schema, settings.fragments)
        self.begun, self.ended, self.moved = [], [], []
        self.learner = GossipLearner(
            self.model,
            self.layouts,
            settings,
            Rejoin(round, tuple(np.zeros(layout.size, np.float32) for layout in self.layouts)),
            begin=self.begun.append,
            exchange=self.ended.append,
            applied=self.moved.append,
        )
        self.learner.launch()

    def train(self, steps, by=-1.0):
        """Steps that each move every parameter by ``by``."""
        for _ in range(steps):
            for values in self.model.values.values():
                values += np.float32(by)
            self.learner.step(8)

    def vectors(self, fill):
        return tuple(np.full(layout.size, fill, np.float32) for layout in self.layouts)

    def mix(self, round, fill):
        for fragment, vector in enumerate(self.vectors(fill)):
            self.learner.deliver(Mixed(round, fragment, vector))

    def answer(self, fill, partners=("b",)):
        self.learner.deliver(Answer(self.learner.state.round, self.vectors(fill), partners, 0.5))
        return self.learner.align()

    @property
    def values(self):
        return {float(value) for values in self.model.values.values() for value in values.ravel()}


def test_without_mix2_a_round_ends_within_the_step_and_nothing_waits():
    bench = Bench(FREE)
    bench.mix(0, 10.0)
    bench.train(3)
    assert not bench.learner.blocked and not bench.ended
    assert bench.values == {7.0}
    assert [begun.round for begun in bench.begun] == [0, 1]
    assert (bench.begun[1].steps, bench.begun[1].tokens) == (3, 24)


def test_a_missing_mixed_start_leaves_the_own_one():
    bench = Bench(FREE)
    bench.learner.deliver(Mixed(0, 0, np.full(bench.layouts[0].size, 10.0, np.float32)))
    bench.train(3)
    assert bench.values == {7.0, -3.0}
    assert bench.moved[0].mixed == 1


def test_a_mixed_start_of_another_round_is_not_used():
    bench = Bench(FREE)
    bench.mix(4, 10.0)
    bench.train(3)
    assert bench.values == {-3.0}


def test_with_mix2_the_gradients_go_out_and_training_waits_for_the_answer():
    bench = Bench()
    bench.train(3)
    assert bench.learner.blocked and len(bench.ended) == 1
    assert {float(value) for gradient in bench.ended[0].gradients for value in gradient} == {3.0}
    bench.mix(0, 10.0)
    assert bench.answer(5.0)
    assert bench.values == {5.0} and not bench.learner.blocked
    assert bench.moved[0].partners == ("b",) and bench.moved[0].waited == 0.5


def test_an_answer_to_another_round_changes_nothing():
    bench = Bench()
    bench.train(3)
    bench.learner.deliver(Answer(7, bench.vectors(5.0), (), 0.0))
    assert not bench.learner.align() and bench.learner.blocked


def test_nesterov_steps_from_the_mixed_start_with_the_nodes_own_momentum():
    bench = Bench(replace(FREE, outer=Nesterov(lr=0.5, momentum=0.5, warmup=0.0)))
    bench.train(3)
    assert bench.values == {-0.5 * (3.0 + 0.5 * 3.0)}
    bench.mix(1, 8.0)
    bench.train(3)
    assert bench.values == {8.0 - 0.5 * (3.0 + 0.5 * (0.5 * 3.0 + 3.0))}


def test_noloco_takes_the_distance_from_the_mixed_start_into_momentum():
    bench = Bench(replace(WAITING, mix2=Pair(), outer=HeavyBall(0.5, 0.5, 0.0), pull="gradient"))
    phi, delta = 0.0, 0.0
    for round, (mean, gradient) in enumerate([(4.0, 1.0), (2.0, 3.0)]):
        bench.train(3)
        bench.mix(round, mean)
        bench.answer(gradient)
        delta = 0.5 * delta - 0.5 * gradient + 0.5 * (mean - phi)
        phi += delta
        assert bench.values == {phi}


def test_averaged_momentum_comes_with_the_mixed_start():
    settings = replace(FREE, outer=Nesterov(lr=1.0, momentum=0.5, warmup=0.0), average_momentum=True)
    bench = Bench(settings)
    assert [vector.size for vector in bench.begun[0].vectors] == [2 * layout.size for layout in bench.layouts]
    for layout in bench.layouts:
        vector = np.concatenate([np.full(layout.size, 8.0), np.full(layout.size, 4.0)]).astype(np.float32)
        bench.learner.deliver(Mixed(0, layout.fragment, vector))
    bench.train(3)
    assert bench.values == {8.0 - (3.0 + 0.5 * (0.5 * 4.0 + 3.0))}


def test_merged_buffers_take_the_gradient_without_rate_and_momentum():
    model = ToyModel(tensors=4, elements=4)
    model.schema = Schema(
        tuple(replace(t, role="buffer" if t.name == "block.0.weight" else t.role) for t in model.schema.tensors)
    )
    bench = Bench(replace(FREE, outer=Nesterov(lr=0.5, momentum=0.5, warmup=0.0)), model)
    bench.mix(0, 10.0)
    bench.train(3)
    assert set(bench.model.values["block.0.weight"]) == {7.0}
    assert set(bench.model.values["block.1.weight"]) == {10.0 - 0.5 * 1.5 * 3.0}


@pytest.mark.parametrize(("steps", "hurried", "over"), [(2, -1, False), (3, -1, True), (1, 5, True), (1, 4, False)])
def test_a_round_is_over_after_its_steps_or_when_others_have_gone_on(steps, hurried, over):
    assert is_over(GossipState(round=5, local_step=steps), 3, hurried) is over


def test_a_hurried_round_ends_at_the_next_step():
    bench = Bench(FREE)
    bench.learner.hurry(0)
    assert bench.values == {0.0}
    bench.train(1)
    assert bench.learner.state.round == 1 and bench.moved[0].steps == 1


def test_a_node_too_far_behind_starts_from_the_mean_without_momentum():
    bench = Bench(replace(FREE, outer=Nesterov(lr=1.0, momentum=0.5, warmup=0.0)))
    bench.train(4)
    bench.learner.deliver(Rejoin(9, bench.vectors(6.0)))
    assert bench.learner.align() and bench.values == {6.0}
    assert bench.learner.state.round == 9 and bench.moved[-1].rejoined
    assert bench.learner.state.global_step >= 27
    bench.train(3)
    assert bench.values == {6.0 - 1.5 * 3.0}


def test_a_node_that_waits_for_mix2_is_freed_by_a_rejoin():
    bench = Bench()
    bench.train(3)
    bench.learner.deliver(Rejoin(9, bench.vectors(6.0)))
    assert bench.learner.align() and not bench.learner.blocked


def test_another_number_for_the_round_keeps_everything_else():
    bench = Bench(FREE, round=7)
    bench.train(2)
    bench.learner.deliver(Renumber(7, 4))
    bench.learner.align()
    assert bench.values == {-2.0} and bench.learner.state.round == 4 and bench.begun[-1].round == 4


def test_values_that_are_not_finite_never_leave_the_node():
    bench = Bench()
    for round in range(3):
        bench.train(3, by=float("nan") if round < 2 else float("inf"))
        assert bench.values == {0.0} and not bench.ended
    assert bench.learner.poisoned and bench.model.resets == 3


def test_a_sound_round_forgives_earlier_ones():
    bench = Bench(FREE)
    bench.train(3, by=float("nan"))
    bench.train(3)
    assert bench.learner.state.poisoned == 0 and bench.values == {-3.0}


def test_finishing_ends_the_round_and_waits_for_its_mean():
    bench = Bench(FREE)
    bench.train(1)
    bench.mix(0, 0.0)
    bench.learner.finish()
    assert bench.begun[-1].round == 1 and bench.learner.outstanding == (0, 1)
    bench.learner.deliver(Mean(0, 0, bench.vectors(5.0)[0]))
    bench.learner.deliver(Mean(1, 1, bench.vectors(5.0)[1]))
    bench.learner.align()
    assert bench.learner.outstanding == (0,)
    bench.learner.deliver(Mean(1, 0, bench.vectors(5.0)[0]))
    bench.learner.settle()
    assert bench.values == {5.0} and bench.learner.outstanding == ()


def test_finishing_waits_for_the_mixed_start_of_the_last_round():
    bench = Bench(FREE)
    bench.train(1)
    bench.learner.finish()
    assert bench.begun[-1].round == 0 and bench.learner.outstanding == (0, 1)
    bench.learner.deliver(Mean(0, 0, bench.vectors(10.0)[0]))
    bench.learner.deliver(Mean(0, 1, bench.vectors(10.0)[1]))
    bench.learner.align()
    assert bench.begun[-1].round == 0 and bench.learner.outstanding == (0, 1)
    bench.mix(0, 10.0)
    assert bench.learner.align() and bench.values == {9.0}
    assert bench.begun[-1].round == 1 and bench.learner.outstanding == (0, 1)


def test_finishing_gives_up_a_mixed_start_that_does_not_come():
    bench = Bench(FREE)
    bench.train(1)
    bench.learner.finish()
    bench.learner.deliver(Unmixed())
    assert bench.learner.align() and bench.values == {-1.0} and bench.begun[-1].round == 1
    bench.learner.deliver(Unmixed())
    assert not bench.learner.align() and bench.begun[-1].round == 1


def test_what_a_last_round_trained_is_not_run_over_by_momentum():
    bench = Bench(replace(FREE, outer=Nesterov(lr=1.0, momentum=0.9, warmup=0.0)))
    for _ in range(8):
        bench.train(3)
    before = bench.values.pop()
    bench.train(1)
    bench.learner.finish()
    bench.learner.deliver(Unmixed())
    bench.learner.align()
    whole, trained = before - (1.0 + 0.9 * (0.9 * sum(3 * 0.9**n for n in range(8)) + 1.0)), before - 1.0
    assert bench.values.pop() == pytest.approx(whole / 3 + trained * 2 / 3, rel=1e-5)


def test_settling_without_a_mean_keeps_the_model():
    bench = Bench(FREE)
    bench.train(1)
    bench.learner.finish()
    bench.learner.deliver(Unmixed())
    bench.learner.settle()
    assert bench.values == {-1.0}


def test_anchors_are_the_newest_means_or_the_own_start():
    bench = Bench(FREE)
    bench.learner.deliver(Mean(0, 1, bench.vectors(5.0)[1]))
    assert [float(anchor[0]) for anchor in bench.learner.anchors()] == [0.0, 5.0]
    assert bench.learner.versions == (0, 0)


class Probe(ToyModel):
    """A model with outputs of a given shape."""

    shape: tuple[int, ...] = (2, 3)

    def probe_outputs(self):
        return np.full(self.shape, 1 / 3, np.float32)


def test_outputs_are_probed_every_so_many_rounds():
    bench = Bench(replace(FREE, probe_every=2), Probe(tensors=4, elements=4))
    bench.train(6)
    assert [begun.outputs is None for begun in bench.begun] == [False, True, False]


def test_outputs_of_another_shape_are_refused():
    model = Probe(tensors=4, elements=4)
    model.shape = (6,)
    with pytest.raises(ConfigurationError, match="probe"):
        Bench(FREE, model)
