"""Whole runs on virtual time: the engine of production with simulated trainers and store."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.events import Event, RoundCommitted, RoundTakenOver
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.checks import committed_parameters, forks, tape
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.store import SimulatedStore, Weather
from gradientmail_core.sim.world import SimulatedNode, ended

SETTINGS = DiLoCo(sync_every=20, fragments=4, grace_seconds=0.5)


class World:
    """A shared store and the nodes around it."""

    def __init__(self, loop: VirtualLoop, weather: Weather | None = None) -> None:
        self.loop = loop
        self.shared = MemoryMailbox("run")
        self.weather = weather or Weather()
        self.nodes: list[SimulatedNode] = []
        self.log: list[tuple[float, str, Event]] = []

    def node(self, name: str, *, settings: DiLoCo = SETTINGS, steps: int = 100, **options: Any) -> SimulatedNode:
        seed = len(self.nodes) + 1
        clock = VirtualClock(self.loop)
        store = SimulatedStore(self.shared, clock, seed, self.weather)
        options.setdefault("timeouts", Timeouts(lease=12.0))
        node = SimulatedNode(name, store, settings, clock, seed, steps, **options)
        node.on_event = lambda event: self.log.append((self.loop.time(), name, event))
        self.nodes.append(node)
        return node.launch()

    def events(self, kind: type[Event]) -> list[Any]:
        return [event for _, _, event in self.log if isinstance(event, kind)]


def virtually(main: Any) -> Any:
    def run(loop: VirtualLoop) -> Coroutine[Any, Any, Any]:
        return main(World(loop))

    return run_virtually(run)


def test_one_node_alone_commits_every_round() -> None:
    async def main(world: World) -> None:
        node = world.node("a")
        await ended([node])
        records = await tape(world.shared)
        assert [record.round for record in records] == list(range(4, 4 + 20))
        parameters = await committed_parameters(world.shared)
        for name, values in node.model.values.items():
            assert np.array_equal(values, parameters[name])

    virtually(main)


def test_two_nodes_end_on_the_committed_bytes() -> None:
    async def main(world: World) -> None:
        nodes = [world.node(name, min_nodes=2) for name in ("a", "b")]
        await ended(nodes)
        records = await tape(world.shared)
        assert all(len(record.participants) == 2 for record in records), [len(r.participants) for r in records]
        parameters = await committed_parameters(world.shared)
        for node in nodes:
            for name, values in node.model.values.items():
                assert np.array_equal(values, parameters[name]), (node.name, name)

    virtually(main)


def test_killed_closer_is_replaced_within_the_lease_timeout() -> None:
    async def main(world: World) -> None:
        nodes = [world.node(name, steps=600, min_nodes=3) for name in ("a", "b", "c")]
        await asyncio.sleep(20)
        closers = {event.closer for event in world.events(RoundTakenOver)}
        assert not closers
        await nodes[0].kill()
        killed_at = world.loop.time()
        before = len(await tape(world.shared))
        await asyncio.sleep(12.0 + 5.0)
        after = await tape(world.shared)
        assert len(after) - before >= 4
        fragments = {record.round % 4 for record in after[before:]}
        assert fragments == {0, 1, 2, 3}
        assert killed_at
        await ended(nodes[1:])
        assert not await forks(world.shared)

    virtually(main)


def test_late_joiner_is_merged() -> None:
    async def main(world: World) -> None:
        first = [world.node(name, steps=400, min_nodes=2) for name in ("a", "b")]
        await asyncio.sleep(15)
        late = world.node("c", steps=200)
        await ended([*first, late])
        records = await tape(world.shared)
        merged = [record.round for record in records if "c" in {p.node for p in record.participants}]
        assert len(merged) >= 20
        parameters = await committed_parameters(world.shared)
        for name, values in first[0].model.values.items():
            assert np.array_equal(values, parameters[name])

    virtually(main)


@pytest.mark.parametrize("seed", range(3))
def test_equal_seeds_give_equal_tapes(seed: int) -> None:
    async def main(world: World) -> list[bytes]:
        nodes = [world.node(name, min_nodes=2, steps=60) for name in ("a", "b", "c")]
        await ended(nodes)
        return [record.encoded() for record in await tape(world.shared)]

    assert virtually(main) == virtually(main)


def test_closing_spreads_over_the_nodes() -> None:
    async def main(world: World) -> None:
        nodes = [world.node(name, min_nodes=4, steps=300) for name in ("a", "b", "c", "d")]
        await ended(nodes)
        records = await tape(world.shared)
        assert {record.node for record in records[len(records) // 2 :]} == {"a", "b", "c", "d"}
        assert len(world.events(RoundCommitted)) == len(records)

    virtually(main)
