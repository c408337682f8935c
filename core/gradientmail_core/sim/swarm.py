"""Random runs with everything going wrong, judged by the protocol's invariants.

A scenario (:mod:`gradientmail_core.sim.scenario`) is played on virtual time with the production engine: nodes join,
suffer their faults (kills at any await, restarts, freezes, partitions, outages, hung, slow and poisoned trainers,
garbage and replayed objects under any prefix); then faults stop and the run must come back. What is checked, all
along and at the end, is in :mod:`gradientmail_core.sim.judge`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import assert_never

from gradientmail_core.events import Event
from gradientmail_core.mailbox.retrying import RetryPolicy
from gradientmail_core.protocol.keys import DeltaKey, HeadKey, creation_key, parse_live, tape_key
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.judge import Judge
from gradientmail_core.sim.loop import Deadlock, VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.scenario import (
    FAULT_SECONDS,
    Cut,
    Fault,
    Freeze,
    Hang,
    Junk,
    Kill,
    Outage,
    Partition,
    Poison,
    Scenario,
    Slow,
)
from gradientmail_core.sim.store import SharedStore, SimulatedStore, Weather
from gradientmail_core.sim.world import SimulatedNode, ToyModel

LEASE_SECONDS = 6.0
CALM_SECONDS = 25.0
DEADLINE_SECONDS = 3600.0
REQUEST_DEADLINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a run: violated invariants, and how much happened."""

    seed: int
    violations: tuple[str, ...]
    rounds: int
    seconds: float


def play(script: Scenario) -> Verdict:
    """Run a scenario to its end; every violation found, and no exception."""
    try:
        return run_virtually(lambda loop: Arena(loop, script).play())
    except Deadlock as deadlock:
        return Verdict(script.seed, (f"deadlock: {deadlock}",), 0, 0.0)
    except Exception as error:  # a defect of the run or of its judge: either way this seed is to be looked at
        return Verdict(script.seed, (f"the run broke off: {error!r}",), 0, 0.0)


def story(script: Scenario, tell: Callable[[str], None]) -> Verdict:
    """Run a scenario and tell every event of every node as it happens."""
    tell(str(script))
    return run_virtually(lambda loop: Arena(loop, script, tell).play())


class Arena:
    """One run being played; ``tell`` hears every event."""

    def __init__(self, loop: VirtualLoop, script: Scenario, tell: Callable[[str], None] = lambda line: None) -> None:
        self._tell = tell
        self._loop = loop
        self._script = script
        self._judge = Judge(script.settings, loop)
        self._shared = SharedStore("swarm", self._judge.wrote)
        self._judge.watches(self._shared)
        self._stores: dict[int, SimulatedStore] = {}
        self._nodes: dict[int, SimulatedNode] = {}
        self._lives = 0
        self._is_calm = False
        self._running: set[asyncio.Task[None]] = set()

    async def play(self) -> Verdict:
        """Join, suffer, calm down, stop; then judge."""
        others = [asyncio.ensure_future(self._join(node, at)) for node, at in enumerate(self._script.joins)]
        others += [asyncio.ensure_future(self._strike(fault)) for fault in self._script.faults]
        watching = asyncio.ensure_future(self._judge.watch())
        await asyncio.gather(*others)
        await asyncio.sleep(max(FAULT_SECONDS - self._loop.time(), 0.0))
        self._calm()
        await self._judge.calm(self._living(), CALM_SECONDS, self._script.lingers)
        watching.cancel()
        await self._finish()
        await self._judge.conclude()
        rounds = await self._judge.rounds()
        return Verdict(self._script.seed, tuple(self._judge.violations), rounds, self._loop.time())

    def _living(self) -> list[SimulatedNode]:
        return [node for node in self._nodes.values() if node.task is not None and not node.task.done()]

    async def _join(self, number: int, at: float) -> None:
        await asyncio.sleep(at)
        self._launch(number)

    def _launch(self, number: int) -> None:
        self._lives += 1
        seed = self._script.seed * 1000 + self._lives
        clock = VirtualClock(self._loop, offset=number * 1e5, rate=self._script.drifts[number])
        store = SimulatedStore(self._shared, clock, seed, self._weather(number))
        store.up = number not in self._stores or self._stores[number].up
        self._stores[number] = store
        node = SimulatedNode(
            f"node-{number}",
            store,
            self._script.settings,
            clock,
            seed,
            steps=10**9,
            step_seconds=self._script.speeds[number],
            timeouts=Timeouts(lease=LEASE_SECONDS, progress=15.0),
            model=ToyModel(tensors=4, elements=8),
            policy=RetryPolicy(deadline=REQUEST_DEADLINE_SECONDS),
        )
        node.on_event = lambda event: self._heard(node, event)
        node.on_commit = self._judge.applied
        self._nodes[number] = node
        self._judge.born(node)
        node.launch()

    def _weather(self, number: int) -> Weather:
        weather = self._script.weather
        return (
            weather.calm() if self._is_calm else replace(weather, latency=weather.latency * self._script.lines[number])
        )

    def _heard(self, node: SimulatedNode, event: Event) -> None:
        self._tell(f"{self._loop.time():8.2f} {node.name} {event}")
        self._judge.heard(event)

    async def _strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        match fault:
            case Outage(seconds=seconds):
                await self._outage(list(self._stores), seconds)
            case Partition(node=node, seconds=seconds):
                await self._outage([node] if node in self._stores else [], seconds)
            case Junk():
                await self._junk(fault)
            case Kill(node=node, down=down):
                await self._kill(node, down)
            case Cut(node=node, down=down):
                if node in self._stores:
                    self._stores[node].cut = lambda: self._after(self._kill(node, down))
            case Freeze(node=node, seconds=seconds):
                await self._freeze(node, seconds)
            case Hang(node=node, seconds=seconds):
                await self._hang(node, seconds)
            case Slow(node=node, seconds=seconds, times=times):
                await self._slow(node, seconds, times)
            case Poison(node=node, value=value):
                if node in self._nodes:
                    self._nodes[node].model.poison(value)
            case _:
                assert_never(fault)

    async def _outage(self, numbers: list[int], seconds: float) -> None:
        for number in numbers:
            self._stores[number].up = False
        await asyncio.sleep(seconds)
        for number in numbers:
            self._stores[number].up = True

    async def _kill(self, number: int, down: float | None) -> None:
        if number not in self._nodes:
            return
        await self._nodes[number].kill()
        if down is not None:
            await asyncio.sleep(down)
            if self._nodes[number].task is None or self._nodes[number].task.done():  # type: ignore[union-attr]
                self._launch(number)

    async def _freeze(self, number: int, seconds: float) -> None:
        if number in self._nodes:
            clock = self._nodes[number].clock
            clock.freeze()
            await asyncio.sleep(seconds)
            clock.thaw()

    async def _hang(self, number: int, seconds: float) -> None:
        if number in self._nodes:
            node = self._nodes[number]
            node.paused = True
            await asyncio.sleep(seconds)
            node.paused = False

    def _after(self, work: Coroutine[object, object, None]) -> None:
        self._running.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._running.discard)

    async def _slow(self, number: int, seconds: float, times: float) -> None:
        if number in self._nodes:
            node = self._nodes[number]
            node.step_seconds *= times
            await asyncio.sleep(seconds)
            node.step_seconds /= times

    async def _junk(self, junk: Junk) -> None:
        if junk.kind == "replay":
            return await self._replay()
        keys = {
            "delta": DeltaKey(junk.round, "node-0").path,
            "tape": tape_key(junk.round, 0),
            "head": HeadKey(0, junk.round).path,
            "lease": "live/leases/node-0/0000000001-t0-nothex",
            "stray": f"live/deltas/readme-{junk.round}.txt",
            "creation": creation_key(junk.round % 3),
        }
        await self._shared.create(keys[junk.kind], b"not a record")

    async def _replay(self) -> None:
        """Let the newest snapshot appear under its node's key of the next round, too."""
        keys = [parse_live(entry.key) async for entry in self._shared.list("live/deltas/")]
        deltas = [key for key in keys if isinstance(key, DeltaKey)]
        if deltas:
            newest = max(deltas, key=lambda key: (key.round, key.node))
            body = await self._shared.get(newest.path)
            again = DeltaKey(newest.round + self._script.settings.fragments, newest.node)
            await self._shared.put(again.path, body or b"")

    def _calm(self) -> None:
        """End every fault; if nobody is left, one node comes back."""
        self._is_calm = True
        for number, store in self._stores.items():
            store.up, store.cut = True, None
            store.weather = self._weather(number)
        for node in self._nodes.values():
            node.clock.thaw()
            node.paused = False
        if not self._living():
            self._launch(0)

    async def _finish(self) -> None:
        """Let every node end its loop and leave."""
        self._judge.may_leave = True
        for node in self._living():
            node.steps = 0
        lives = [node.task for node in self._living() if node.task is not None]
        if not lives:
            return self._judge.violated("no node lives")
        _, pending = await asyncio.wait(lives, timeout=DEADLINE_SECONDS)
        for task in pending:
            self._judge.violated("a node did not leave")
            task.cancel()
