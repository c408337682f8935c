"""What users of such systems ran into, each as one scenario on virtual time.

Nodes that differ in schedule, clock and number; closers that race, or die at any write; joins, hot keys, and memory.
"""

import asyncio
import gc
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.chain import succeeded
from gradientmail_core.errors import MailboxUnavailable
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.mailbox.base import Body, CreateOutcome
from gradientmail_core.protocol.exchange import commit_round
from gradientmail_core.protocol.keys import blob_round
from gradientmail_core.sim.checks import committed_parameters, forks, tape
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop
from gradientmail_core.sim.store import SimulatedStore, Weather
from gradientmail_core.sim.world import SimulatedNode, ToyModel, ended
from tests.core.engine.parts import SETTINGS, TIMEOUTS, Place, created, first_head, record_after, virtually

QUICK = replace(SETTINGS, grace_seconds=0.3)
TOGETHER = replace(SETTINGS, overlap_steps=0, quorum_size=3, sync_every=10, follow=False)


def test_nodes_whose_schedules_do_not_meet_still_merge_together() -> None:
    """Four nodes start a quarter of a cycle apart: after five cycles nearly all of them are in every round."""

    async def main(place: Place) -> None:
        nodes = []
        for name in "abcd":
            nodes.append(place.launch(name, settings=DiLoCo(sync_every=40, fragments=2), steps=10**6))
            await asyncio.sleep(1.0)
        await asyncio.sleep(5 * 4.0)
        known = len(await tape(place.mailbox))
        await asyncio.sleep(10 * 4.0)
        records = (await tape(place.mailbox))[known:]
        assert len(records) >= 15
        assert sum(len(record.participants) for record in records) / len(records) >= 3.5
        for node in nodes:
            await node.kill()

    virtually(main)


def committed_by(clocks: dict[str, tuple[float, float]]) -> list[tuple[int, list[str], list[str]]]:
    """What three nodes commit whose clocks are shifted by so many seconds and run at such rates."""

    async def main(place: Place) -> list[tuple[int, list[str], list[str]]]:
        nodes = []
        for number, (name, (offset, rate)) in enumerate(clocks.items()):
            clock = VirtualClock(place.loop, offset=offset, rate=rate)
            store = SimulatedStore(place.mailbox, clock, number, Weather())
            node = SimulatedNode(name, store, TOGETHER, clock, number, 100, min_nodes=3, timeouts=TIMEOUTS)
            nodes.append(node.launch())
        await ended(nodes)
        assert not await forks(place.mailbox)
        return [
            (one.round, [who.node for who in one.participants], [section.sha256 for section in one.sections])
            for one in await tape(place.mailbox)
        ]

    return virtually(main)


def test_clocks_that_differ_by_hours_and_drift_commit_the_same() -> None:
    alike = committed_by({"a": (0.0, 1.0), "b": (0.0, 1.0), "c": (0.0, 1.0)})
    skewed = committed_by({"a": (3600.0, 1.05), "b": (0.0, 0.95), "c": (7200.0, 1.0)})
    assert len(alike) >= 20 and skewed == alike


def test_the_model_does_not_jump_when_the_number_of_nodes_changes() -> None:
    """Four, one, then eight nodes: no commit moves the parameters by more than twice what the last few did."""

    async def main(place: Place) -> None:
        settings = replace(SETTINGS, fragments=1, grace_seconds=0.5)
        many = [place.launch(f"a{n}", settings=settings, steps=10**6, min_nodes=4) for n in range(4)]
        await asyncio.sleep(18.0)
        for node in many[1:]:
            await node.kill()
        await asyncio.sleep(18.0)
        many += [place.launch(f"b{n}", settings=settings, steps=10**6) for n in range(7)]
        await asyncio.sleep(18.0)
        for node in many:
            await node.kill()
        counts = {len(record.participants) for record in await tape(place.mailbox)}
        assert counts >= {1, 4, 8}

    steps: list[float] = []

    async def moved(place: Place) -> None:
        before = None
        task = asyncio.ensure_future(main(place))
        while not task.done():
            await asyncio.sleep(0.25)
            if not place.listed("tape/"):
                continue
            values = np.concatenate([part.ravel() for part in (await committed_parameters(place.mailbox)).values()])
            if before is not None and not np.array_equal(values, before):
                steps.append(float(np.linalg.norm(values - before)))
            before = values
        await task

    virtually(moved)
    trend = [float(np.median(steps[max(n - 4, 0) : n])) for n in range(4, len(steps))]
    assert len(trend) > 15
    assert all(step <= 2 * usual for step, usual in zip(steps[4:], trend, strict=True)), steps


def test_eight_closers_race_for_every_round_through_bad_weather() -> None:
    """Undecided creates and lost answers: each round has one record, and everybody reads the same."""
    rounds, weather = 100, Weather(latency=0.01, undecided=0.05, answer_lost=0.02)

    async def main(place: Place) -> None:
        host = place.host("a")
        run = await created(host)
        clocks = [VirtualClock(place.loop) for _ in range(8)]
        stores = [SimulatedStore(place.mailbox, clock, n, weather) for n, clock in enumerate(clocks)]
        heads = [first_head(run)] * 8

        async def closing(n: int) -> Any:
            record = record_after(heads[n], run, node=f"n{n}", nonce=f"{place.loop.time():.6f}{n}".encode().hex())
            while True:
                try:
                    return await commit_round(stores[n], clocks[n], record)
                except MailboxUnavailable:
                    await asyncio.sleep(0.05)

        writers: Counter[str] = Counter()
        for _ in range(rounds):
            decided = await asyncio.gather(*(closing(n) for n in range(8)))
            assert len({one.digest for one in decided}) == 1
            writers[decided[0].record.node] += 1
            heads = [succeeded(head, one, run.fragments, 0.0) for head, one in zip(heads, decided, strict=True)]
        assert len(place.listed("tape/")) == rounds
        assert len(writers) == 8, "everybody wins some"

    virtually(main)


WRITES = range(2, 9)
"""Those of a round: payloads, record, what is swept and the next snapshot; beats come before."""


class Dying:
    """A way to the store on which the process dies at its ``at``-th write from when it is armed, before or after it."""

    def __init__(self, store: SimulatedStore, at: int, before: bool) -> None:
        self._store, self._at, self._before = store, at, before
        self.victim: SimulatedNode | None = None
        self.died_at = ""
        self._writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def _dying(self, key: str, write: Callable[[], Any]) -> Any:
        if self.victim is None:
            return await write()
        number, self._writes = self._writes, self._writes + 1
        if number < self._at:
            return await write()
        if number == self._at and not self._before:
            await write()
        self.died_at = self.died_at or key
        killing = asyncio.ensure_future(self.victim.kill())
        await asyncio.Event().wait()
        await killing

    async def put(self, key: str, body: Body) -> None:
        await self._dying(key, lambda: self._store.put(key, body))

    async def create(self, key: str, body: Body) -> CreateOutcome:
        outcome: CreateOutcome = await self._dying(key, lambda: self._store.create(key, body))
        return outcome

    async def delete(self, key: str) -> None:
        await self._dying(key, lambda: self._store.delete(key))


def killed_at(write: int, before: bool) -> str:
    """Let the closer of everything die at a write; the prefix of its key, after all else was checked."""

    async def main(place: Place) -> str:
        settings = replace(QUICK, fragments=1)
        victim = place.launch("a", settings=settings, steps=10**6, min_nodes=2)
        dying = Dying(victim.mailbox, write, before)  # type: ignore[arg-type]  # a mailbox with one write more
        victim.mailbox = dying
        other = place.launch("b", settings=settings, steps=10**6, role="learner", min_nodes=2)
        await asyncio.sleep(6.5)
        dying.victim = victim
        await asyncio.sleep(6.0)
        assert dying.died_at and victim.task is not None and victim.task.done()
        third = place.launch("c", settings=settings, steps=10**6)
        known = len(await tape(place.mailbox))
        await asyncio.sleep(TIMEOUTS.lease + 10.0)
        records = await tape(place.mailbox)
        assert len(records) >= known + 4 and not await forks(place.mailbox)
        for record in records[-2:]:
            assert {section.key for section in record.sections} <= set(place.listed("blobs/"))
        named = {section.key for record in records[-3:] for section in record.sections}
        strangers = [key for key in place.listed("blobs/") if (blob_round(key) or 0) > 1 and key not in named]
        assert len(strangers) <= 2, strangers
        assert not [key for key in place.listed("live/deltas/") if int(key.split("/")[2]) < records[-2].round]
        for node in (other, third):
            await node.kill()
        return dying.died_at.split("/0")[0]

    return virtually(main)


def test_a_closer_may_die_before_or_after_any_write_of_a_round() -> None:
    """The run goes on, no record names what is missing, and at most the dead closer's own payloads are left over."""
    kinds = {killed_at(write, before) for write in WRITES for before in (True, False)}
    assert kinds >= {"live/deltas", "blobs", "tape"}, kinds


def test_only_who_has_committed_parameters_is_followed() -> None:
    """All incumbents die; a newcomer with other parameters goes on from their last commit, and never from its own."""

    async def main(place: Place) -> None:
        old = [place.launch(name, settings=QUICK, steps=10**6, min_nodes=2) for name in "ab"]
        await asyncio.sleep(12.0)
        for node in old:
            await node.kill()
        before = await committed_parameters(place.mailbox)
        newcomer = place.launch("n", settings=QUICK, steps=40, model=ToyModel(fill=100.0))
        await ended([newcomer])
        after = await committed_parameters(place.mailbox)
        assert not await forks(place.mailbox)
        for name, values in after.items():
            assert np.abs(values - before[name]).max() < 1.0, "not near 100"
            assert not np.array_equal(values, before[name]), "and it trained"

    virtually(main)


def test_a_dead_learner_costs_one_lease_and_then_nothing() -> None:
    """With a quorum of all three a round waits for the dead one until its lease is over; later rounds pay nothing."""

    async def main(place: Place) -> None:
        settings = replace(QUICK, quorum_size=3, fragments=1)
        nodes = [place.launch(name, settings=settings, steps=10**6, min_nodes=3) for name in "abc"]
        await asyncio.sleep(20.0)
        record = (await tape(place.mailbox))[-1]
        victim = next(node for node in nodes if node.name != record.closer)
        await victim.kill()
        times = [place.loop.time()]
        known = len(await tape(place.mailbox))
        while len(times) < 8:
            await asyncio.sleep(0.1)
            if len(await tape(place.mailbox)) > known:
                known += 1
                times.append(place.loop.time())
        gaps = [later - earlier for earlier, later in pairwise(times)]
        slowest = max(range(len(gaps)), key=gaps.__getitem__)
        assert gaps[slowest] <= TIMEOUTS.lease + TIMEOUTS.period + 2.3 + 0.3
        after = gaps[slowest + 1 :]
        assert sum(after) / len(after) <= 2.3, "a cycle is 2 s and closing takes its 0.3"
        assert max(after) <= 4.0, "a third of a lease"
        for node in nodes:
            await node.kill()

    virtually(main)


class Counted(MemoryMailbox):
    """Counts how often each key was written."""

    def __init__(self) -> None:
        super().__init__("run")
        self.writes: Counter[str] = Counter()

    async def put(self, key: str, body: Body) -> None:
        self.writes[key] += 1
        await super().put(key, body)


def test_no_key_is_written_twice() -> None:
    """Some stores allow one write a second to a key, and bill or refuse the others."""

    async def main(place: Place) -> None:
        place.mailbox = counted = Counted()
        nodes = [place.launch(name, settings=DiLoCo(sync_every=20, fragments=4), steps=300) for name in "abc"]
        await ended(nodes)
        assert len(counted.writes) > 150
        assert {key: count for key, count in counted.writes.items() if count > 1} == {}

    virtually(main)


def test_a_join_takes_little_longer_than_its_download() -> None:
    """Ten fragments side by side over a narrow line: training begins within 1.2 times the transfer's time."""
    elements, bandwidth = 20_000, 1e5
    settings = DiLoCo(sync_every=40, fragments=10, compression=None)

    async def main(place: Place) -> None:
        model = ToyModel(10, elements)
        first = place.launch("a", settings=settings, steps=80, model=model)
        await ended([first])
        clock = VirtualClock(place.loop)
        store = SimulatedStore(place.mailbox, clock, 9, Weather(latency=0.02, bandwidth=bandwidth))
        late = SimulatedNode("b", store, settings, clock, 9, 10**6, timeouts=TIMEOUTS, model=ToyModel(10, elements))
        began = place.loop.time()
        late.launch()
        while late.began_at is None:
            await asyncio.sleep(0.05)
        transfer = 4 * 10 * elements / bandwidth
        assert 0.9 * transfer <= place.loop.time() - began <= 1.2 * transfer
        await late.kill()

    virtually(main)


def reachable(root: object, ignoring: tuple[type, ...]) -> int:
    """Objects that ``root`` keeps alive, but for what a simulation holds besides."""
    seen: dict[int, object] = {}
    waiting = [root]
    skipped = (type, types.ModuleType, types.FunctionType, *ignoring)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, skipped):
            continue
        seen[id(one)] = one
        waiting += gc.get_referents(one)
    return len(seen)


def test_what_a_node_remembers_does_not_grow_with_its_run() -> None:
    """After forty rounds and after a hundred and sixty each of two nodes holds as many objects."""

    async def main(place: Place) -> None:
        settings = replace(QUICK, sync_every=6)
        nodes = [place.launch(name, settings=settings, steps=10**6, keeps_events=False) for name in "ab"]
        for node in nodes:
            node.on_event = lambda event: None
        held = []
        for rounds in (40, 160):
            while len(place.listed("tape/")) < rounds:
                await asyncio.sleep(1.0)
            ignoring = (VirtualLoop, SimulatedStore, MemoryMailbox)
            held.append([reachable((node.engine, node.learner), ignoring) for node in nodes])
        for early, late in zip(*held, strict=True):
            assert 500 < late <= 1.05 * early + 100, held
        for node in nodes:
            await node.kill()

    virtually(main)
