"""What the engine promises in figures: requests and dollars, joins, bytes, hung trainers, slow nodes. On virtual time.

Rates are measured over a shorter span than the promise names, after the run has settled: a run in calm weather does
the same in every cycle.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.node import Node
from gradientmail_core.events import PayloadSkipped
from gradientmail_core.mailbox import MemoryMailbox, MeteredMailbox
from gradientmail_core.mailbox.metered import Usage
from gradientmail_core.protocol.keys import HeadKey
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.checks import forks, tape
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.store import SimulatedStore, Weather
from gradientmail_core.sim.world import SimulatedNode, ToyModel
from tests.core.engine.parts import Place, committed, created, first_head, virtually

DAY = 86_400.0


class Fleet:
    """Nodes on one metered store, each with its own meter."""

    def __init__(self, loop: VirtualLoop, settings: DiLoCo, speeds: tuple[float, ...], **options: Any) -> None:
        self.shared = MemoryMailbox("fleet")
        self.meters = []
        self.nodes = []
        for number, seconds in enumerate(speeds, 1):
            clock = VirtualClock(loop)
            meter = MeteredMailbox(SimulatedStore(self.shared, clock, number, Weather(latency=0.02)))
            model = ToyModel(options.get("tensors", 8), options.get("elements", 4))
            timeouts = options.get("timeouts", Timeouts())
            node = SimulatedNode(
                f"n{number:02d}", meter, settings, clock, number, 10**9, seconds,
                min_nodes=len(speeds), timeouts=timeouts, model=model,
                role=options.get("roles", {}).get(f"n{number:02d}", "both"),
            )  # fmt: skip
            self.meters.append(meter)
            self.nodes.append(node.launch())

    async def used(self, seconds: float) -> list[Usage]:
        """What each node used in the next ``seconds``."""
        before = [meter.usage for meter in self.meters]
        await asyncio.sleep(seconds)
        return [meter.usage.since(earlier) for meter, earlier in zip(self.meters, before, strict=True)]

    async def participants(self, seconds: float) -> Counter[str]:
        """How often each node took part in the rounds of the next ``seconds``, and "rounds" themselves."""
        known = len(await tape(self.shared))
        await asyncio.sleep(seconds)
        records = (await tape(self.shared))[known:]
        counts = Counter(participant.node for record in records for participant in record.participants)
        return counts + Counter(rounds=len(records))

    async def kill(self) -> None:
        for node in self.nodes:
            await node.kill()


def fleet(
    settings: DiLoCo, speeds: tuple[float, ...], main: Callable[[Fleet], Awaitable[None]], **options: Any
) -> None:
    async def run(loop: VirtualLoop) -> None:
        nodes = Fleet(loop, settings, speeds, **options)
        await main(nodes)
        await nodes.kill()

    run_virtually(run)


@pytest.mark.parametrize(
    ("fragments", "cycle", "span", "dollars"),
    [(4, 10.0, 200.0, 0.50), (4, 60.0, 480.0, 0.10), (8, 10.0, 120.0, 0.80), (8, 60.0, 360.0, 0.16)],
)
def test_requests_of_three_nodes_stay_within_the_budget(
    fragments: int, cycle: float, span: float, dollars: float
) -> None:
    """Dollars a node and day at AWS list prices, from counted requests; an hour is the same rate for longer."""

    async def main(nodes: Fleet) -> None:
        await asyncio.sleep(4 * cycle + 10)
        used = await nodes.used(span)
        rounds = len(await tape(nodes.shared))
        assert rounds >= (span / cycle + 3) * fragments, "it really ran"
        mean = sum(usage.dollars for usage in used) / len(used)
        assert mean * DAY / span <= dollars

    settings = DiLoCo(sync_every=100, fragments=fragments)
    fleet(settings, (cycle / 100,) * 3, main)


def test_a_fast_node_draws_the_round_clocks_of_the_others_along() -> None:
    """It closes nothing itself; with a clock far ahead, rounds would end a grace after it, before others are due."""

    async def main(nodes: Fleet) -> None:
        await asyncio.sleep(120.0)
        counts = await nodes.participants(200.0)
        clocks = [node.learner.state.global_step for node in nodes.nodes if node.learner is not None]
        assert counts["rounds"] >= 20
        assert min(counts[node.name] for node in nodes.nodes) >= 0.9 * counts["rounds"]
        assert max(clocks) - min(clocks) <= 20

    fleet(DiLoCo(sync_every=20, fragments=2), (1.0, 1.0, 0.85), main, roles={"n03": "learner"})


def requests_of_a_join(versions: int) -> Usage:
    """Requests of a node that joins a run of so many rounds of each fragment; only the newest few lie in the store."""

    async def main(place: Place) -> Usage:
        host = place.host("a")
        run = await created(host)
        for fragment in range(run.fragments):
            head = replace(first_head(run, fragment), version=versions - 6)
            for _ in range(6):
                head = await committed(host, run, head, 1.0)
            await place.mailbox.put(HeadKey(fragment, (versions - 3) * run.fragments + fragment).path, b"{}")
        meter = MeteredMailbox(place.mailbox)
        model = ToyModel()
        node = Node(place.host("late", meter), run.settings)
        found = await node.enter()
        commits = await node.join(found, model.schema, None, run.layouts, [])
        assert [commit.head.version for commit in commits] == [versions] * run.fragments
        return meter.usage

    return virtually(main)


def test_a_join_costs_the_same_at_any_age_of_the_run() -> None:
    young, older, old = (requests_of_a_join(versions) for versions in (10, 1_000, 100_000))
    assert young.requests == older.requests == old.requests
    assert young.lists == old.lists <= 3 and young.gets <= 2 + 2 * 8


def test_no_node_downloads_more_than_two_and_a_half_models_a_cycle() -> None:
    """Sixteen nodes of equal speed and sixteen fragments; closing spreads over all of them."""
    cycle, count, elements = 20.0, 16, 4096

    async def main(nodes: Fleet) -> None:
        await asyncio.sleep(1.8 * cycle)
        used = await nodes.used(cycle)
        model_bytes = 4 * count * elements
        assert max(usage.bytes_down for usage in used) <= 2.5 * model_bytes
        assert min(usage.bytes_down for usage in used) >= 0.7 * model_bytes, "each loads what others commit"

    settings = DiLoCo(sync_every=16, fragments=count, compression=None)
    fleet(settings, (cycle / 16,) * count, main, tensors=count, elements=elements)


def test_a_hung_trainer_is_left_out_until_it_wakes() -> None:
    async def main(nodes: Fleet) -> None:
        await asyncio.sleep(15)
        nodes.nodes[1].paused = True
        await asyncio.sleep(25)
        hung = await nodes.participants(20)
        assert hung["n02"] == 0 and hung["n01"] == hung["rounds"] > 10
        board = nodes.nodes[0].engine
        assert board is not None and board.live_learners == 1, "alive, and not waited for"
        nodes.nodes[1].paused = False
        await asyncio.sleep(10)
        awake = await nodes.participants(20)
        assert awake["n02"] >= 0.8 * awake["rounds"] > 8

    settings = DiLoCo(sync_every=20, fragments=2, quorum_size=2)
    fleet(settings, (0.1, 0.1), main, timeouts=Timeouts(lease=12.0, progress=15.0))


def test_a_slow_node_contributes_and_stalls_nobody() -> None:
    """Speeds 1, 1, 1, 0.4 with the default settings: 90 % of every node's tokens are merged, stalls are at most 2 %.

    What a node trains between its snapshot and the commit is kept by ``Carry``; a missed round by ``rebase``.
    """
    span = 250.0

    async def main(nodes: Fleet) -> None:
        await asyncio.sleep(span)
        merged: Counter[str] = Counter()
        for record in await tape(nodes.shared):
            for participant in record.participants:
                merged[participant.node] += participant.tokens
        for node in nodes.nodes:
            assert node.learner is not None
            assert merged[node.name] / 4 >= 0.9 * node.learner.state.tokens, node.name
            assert node.stall_seconds <= 0.02 * span

    settings = DiLoCo(sync_every=60, fragments=4)
    fleet(settings, (0.1, 0.1, 0.1, 0.25), main)


def test_a_lost_payload_of_the_newest_commit_does_not_end_the_run() -> None:
    """The payloads of fragment 0's newest commit vanish while nobody is there; the version before takes its place."""

    async def main(place: Place) -> None:
        settings = DiLoCo(sync_every=20, fragments=2)
        first = place.launch("a", settings=settings, steps=200)
        await asyncio.gather(*(node.task for node in [first] if node.task is not None))
        newest = max(record.round for record in await tape(place.mailbox) if record.round % 2 == 0)
        for key in place.listed(f"blobs/{newest:010d}/"):
            await place.mailbox.delete(key)
        second = place.launch("b", settings=settings, steps=400)
        await asyncio.gather(*(node.task for node in [second] if node.task is not None))
        assert [event.round for event in place.events(PayloadSkipped)] == [newest]
        records = [record.round for record in await tape(place.mailbox) if record.round % 2 == 0]
        assert max(records) >= newest + 2 * 8 and not await forks(place.mailbox)

    virtually(main)


def test_a_running_node_goes_on_where_a_payload_is_lost() -> None:
    async def main(place: Place) -> None:
        settings = DiLoCo(sync_every=20, fragments=1)
        nodes = [place.launch(name, settings=settings, steps=10**6, min_nodes=2) for name in "ab"]
        await asyncio.sleep(11)
        closer = (await tape(place.mailbox))[-1].closer
        victim, witness = sorted(nodes, key=lambda node: node.name != closer)
        assert victim.engine is not None
        while len(await tape(place.mailbox)) < 8:
            await asyncio.sleep(0.05)
        await victim.kill()
        newest = (await tape(place.mailbox))[-1].round
        for key in place.listed(f"blobs/{newest:010d}/"):
            await place.mailbox.delete(key)
        await asyncio.sleep(60)
        assert (await tape(place.mailbox))[-1].round >= newest + 5, "the other node closes again"
        await witness.kill()

    virtually(main)
