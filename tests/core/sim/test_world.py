"""Simulated nodes: the production engine with a toy trainer, killed, paused and slowed at will."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from gradientmail_core.algorithms.partition import ByBytes
from gradientmail_core.engine.learner import Commit
from gradientmail_core.errors import SchemaMismatch
from gradientmail_core.events import RunJoined, SnapshotPublished
from gradientmail_core.sim.checks import tape
from gradientmail_core.sim.world import ToyModel, ended
from gradientmail_core.tensors.schema import Schema
from tests.core.engine.parts import SETTINGS, Place, virtually

QUICK = replace(SETTINGS, grace_seconds=0.3)


def test_a_toy_model_reads_back_what_was_written() -> None:
    model = ToyModel(tensors=3, elements=10, fill=1.0)
    for fragments in (1, 2, 3):
        for layout in ByBytes().layouts(model.schema, fragments):
            values = np.arange(layout.size, dtype=np.float32)
            model.write(layout, values)
            out = np.empty(layout.size, np.float32)
            model.read(layout, out)
            assert np.array_equal(out, values)


def test_a_toy_model_can_be_cut_by_rows() -> None:
    model = ToyModel(tensors=1, elements=10)
    layouts = ByBytes().layouts(model.schema, 3)
    assert sum(layout.size for layout in layouts) == 10 and len(layouts) == 3
    for number, layout in enumerate(layouts):
        model.write(layout, np.full(layout.size, number, np.float32))
    assert sorted(set(model.values["block.0.weight"])) == [0.0, 1.0, 2.0]


def test_training_moves_every_value_by_the_nodes_own_noise() -> None:
    one, same, other = ToyModel(), ToyModel(), ToyModel()
    for model, seed in ((one, 0), (same, 0), (other, 1)):
        model.train(np.random.default_rng(seed))
    assert all((values != 0.0).all() for values in one.values.values())
    assert all(np.array_equal(values, same.values[name]) for name, values in one.values.items())
    assert not np.array_equal(one.values["block.0.weight"], other.values["block.0.weight"])
    one.reset_optimizer()
    assert one.resets == 1


def test_a_toy_schema_is_that_of_every_equal_model() -> None:
    assert ToyModel().schema == ToyModel(fill=3.0).schema
    assert isinstance(ToyModel(tensors=2).schema, Schema) and len(ToyModel(tensors=2).schema.tensors) == 2


def test_a_life_takes_its_steps_and_tells_its_events_with_their_time() -> None:
    async def main(place: Place) -> None:
        commits: list[Commit] = []
        node = place.launch("a", settings=QUICK, steps=50, step_seconds=0.5, on_commit=commits.append)
        await ended([node])
        assert node.learner is not None and node.learner.state.local_step == 50
        assert 25.0 <= place.loop.time() < 30.0
        assert [type(event) for _, event in node.events].count(RunJoined) == 1
        assert [moment for moment, _ in node.events] == sorted(moment for moment, _ in node.events)
        assert [commit.head.record for commit in commits if commit.head.record] == await tape(place.mailbox)

    virtually(main)


def test_a_killed_node_writes_nothing_more() -> None:
    async def main(place: Place) -> None:
        node = place.launch("a", settings=QUICK, steps=1000)
        await asyncio.sleep(15.0)
        await node.kill()
        before = place.listed()
        await asyncio.sleep(60.0)
        assert place.listed() == before
        assert before[-1].startswith("tape/") and not any("-x" in key for key in place.listed("live/leases/"))

    virtually(main)


def test_a_paused_node_stands_still_and_goes_on() -> None:
    async def main(place: Place) -> None:
        node = place.launch("a", settings=QUICK, steps=100)
        await asyncio.sleep(5.0)
        node.paused = True
        await asyncio.sleep(0.2)
        assert node.learner is not None
        before = node.learner.state.local_step
        await asyncio.sleep(30.0)
        assert node.learner.state.local_step == before
        node.paused = False
        await ended([node])
        assert node.learner.state.local_step == 100

    virtually(main)


def test_a_slow_node_may_be_slowed_while_it_runs() -> None:
    async def main(place: Place) -> None:
        node = place.launch("a", settings=QUICK, steps=100)
        await asyncio.sleep(5.0)
        node.step_seconds = 1.0
        await ended([node])
        assert 50.0 < place.loop.time() < 65.0

    virtually(main)


@pytest.mark.parametrize(("overlap", "stalls"), [(None, False), (0, True)])
def test_only_overlap_steps_stop_training(overlap: int | None, stalls: bool) -> None:
    async def main(place: Place) -> None:
        settings = replace(QUICK, overlap_steps=overlap, follow=False, in_flight=2)
        nodes = [place.launch(name, settings=settings, steps=100, min_nodes=2) for name in ("a", "b")]
        await asyncio.sleep(9.0)
        assert all((node.stall_seconds > 0) == stalls for node in nodes)
        await ended(nodes)
        assert len(place.events(SnapshotPublished)) >= 18

    virtually(main)


def test_what_a_node_dies_of_comes_out() -> None:
    async def main(place: Place) -> None:
        await ended([place.launch("a", settings=QUICK, steps=10)])
        with pytest.raises(SchemaMismatch):
            await ended([place.launch("b", settings=QUICK, model=ToyModel(tensors=2))])

    virtually(main)
