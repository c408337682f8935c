"""Simulated gossip nodes."""

import asyncio

import numpy as np

from gradientmail_core.events import SessionEnded
from gradientmail_core.sim.gossip import Bowl
from tests.core.engine.gossip_parts import virtually


def test_a_bowl_is_descended_to_its_bottom_and_noise_stays_small():
    model, noise = Bowl(rate=0.1, sigma=0.1, bottom=3.0), np.random.default_rng(0)
    for _ in range(200):
        model.train(noise)
    assert np.abs(model.flat() - 3.0).max() < 0.3 and model.flat().std() > 0.0


def test_a_life_takes_its_steps_and_leaves():
    async def main(place):
        node = place.launch("a", steps=50)
        await place.ended()
        return node, place.events(SessionEnded)

    node, ends = virtually(main)
    assert node.learner.state.local_step == 50 and [event.reason for event in ends] == [""]
    assert np.abs(node.model.flat() - 1.0).max() < 0.5


def test_a_killed_node_writes_nothing_more():
    async def main(place):
        node = place.launch("a", steps=10**6)
        await asyncio.sleep(10.0)
        await node.kill()
        before = place.listed()
        await asyncio.sleep(100.0)
        return before, place.listed(), place.events(SessionEnded)

    before, after, ends = virtually(main)
    assert before == after and not ends


def test_equal_seeds_give_equal_runs():
    async def main(place):
        for name in "abc":
            place.launch(name, steps=60, min_nodes=3)
        await place.ended()
        return place.listed(), [node.model.flat().tobytes() for node in place.nodes]

    assert virtually(main) == virtually(main)
