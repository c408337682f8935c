"""Faults on a stage: each does what it says to the node or line it is for, and ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from gradientmail_core.sim.fleet import Fleet, Voyage
from gradientmail_core.sim.loop import VirtualLoop, run_virtually
from gradientmail_core.sim.scenario import Cut, Freeze, Hang, Junk, Kill, Outage, Partition, Poison, Slow
from tests.core.engine.parts import SETTINGS


def on_stage(main: Callable[[Voyage], Coroutine[Any, Any, None]]) -> None:
    async def placed(loop: VirtualLoop) -> None:
        stage = Voyage(loop, Fleet(nodes=2, settings=SETTINGS, seconds=1e6, step_seconds=0.1, lease=12.0))
        stage.launch(0)
        stage.launch(1)
        await asyncio.sleep(5.0)
        await main(stage)

    run_virtually(placed)


async def struck(stage: Voyage, fault: Any, seconds: float = 1.0) -> "asyncio.Task[None]":
    strike = asyncio.ensure_future(stage.strike(fault))
    await asyncio.sleep(seconds)
    return strike


def test_a_killed_node_comes_back_as_another_process() -> None:
    async def main(stage: Voyage) -> None:
        first = stage.nodes[1]
        strike = await struck(stage, Kill(0.0, 1, 4.0))
        assert stage.living() == [stage.nodes[0]]
        await strike
        assert stage.nodes[1] is not first and len(stage.living()) == 2 and stage.lives == 3
        await (await struck(stage, Kill(0.0, 1, None)))
        assert stage.living() == [stage.nodes[0]]

    on_stage(main)


def test_outages_and_partitions_end() -> None:
    async def main(stage: Voyage) -> None:
        strike = await struck(stage, Partition(0.0, 1, 3.0))
        assert stage.stores[0].up and not stage.stores[1].up
        await strike
        strike = await struck(stage, Outage(0.0, 3.0))
        assert not stage.stores[0].up and not stage.stores[1].up
        await strike
        assert stage.stores[0].up and stage.stores[1].up

    on_stage(main)


def test_frozen_hung_and_slow_nodes_train_less_for_a_while() -> None:
    async def main(stage: Voyage) -> None:
        for fault in (Freeze(0.0, 0, 5.0), Hang(0.0, 0, 5.0), Slow(0.0, 0, 5.0, 4.0)):
            before = [stage.nodes[number].trained_seconds for number in (0, 1)]
            steps = stage.nodes[0].learner.state.local_step  # type: ignore[union-attr]  # it trains
            await (await struck(stage, fault))
            took = stage.nodes[0].learner.state.local_step - steps  # type: ignore[union-attr]  # it trains
            assert took < 25 < 40 < (stage.nodes[1].trained_seconds - before[1]) * 10, fault
            await asyncio.sleep(1.0)
        steps = stage.nodes[0].learner.state.local_step  # type: ignore[union-attr]  # it trains
        await asyncio.sleep(5.0)
        assert stage.nodes[0].learner.state.local_step - steps > 45  # type: ignore[union-attr]  # it trains

    on_stage(main)


def test_a_poisoned_trainer_is_refused_and_set_right_by_the_commit() -> None:
    async def main(stage: Voyage) -> None:
        await (await struck(stage, Poison(0.0, 1, float("nan")), 0.01))
        assert all(np.isnan(values).all() for values in stage.nodes[1].model.values.values())
        await asyncio.sleep(15.0)
        assert all(np.isfinite(values).all() for values in stage.nodes[1].model.values.values())

    on_stage(main)


def test_a_node_dies_while_it_commits() -> None:
    async def main(stage: Voyage) -> None:
        first = dict(stage.nodes)
        for number in (0, 1):
            await (await struck(stage, Cut(0.0, number, 0.1), 0.01))
        await asyncio.sleep(20.0)
        assert any(stage.nodes[number] is not first[number] for number in (0, 1))

    on_stage(main)


def test_junk_and_replays_appear_in_the_store() -> None:
    async def main(stage: Voyage) -> None:
        for kind in ("delta", "tape", "head", "lease", "stray", "creation"):
            await (await struck(stage, Junk(0.0, kind, 900), 0.01))
        listed = [entry.key async for entry in stage.shared.list("")]
        assert {"live/deltas/readme-900.txt", "live/deltas/0000000900/node-0"} <= set(listed)
        await stage.shared.delete("live/deltas/0000000900/node-0")
        await stage.shared.put("live/deltas/0000000800/node-1", b"one")
        await (await struck(stage, Junk(0.0, "replay", 0), 0.01))
        assert await stage.shared.get("live/deltas/0000000802/node-1") == b"one"

    on_stage(main)
