"""Random runs with everything going wrong, judged by the protocol's invariants.

A seed draws a configuration (nodes, fragments, quorum, overlap, speeds, clocks), a weather (lost requests and
answers, late writes, lagging listings) and a schedule of faults (kills at any await, restarts, freezes,
partitions, outages, hung trainers, garbage under any prefix). The run is played on virtual time, then faults
stop and it must come back. What is checked, all along and at the end, is in :mod:`gradientmail_core.sim.judge`.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.mailbox.memory import MemoryMailbox
from gradientmail_core.protocol.keys import DeltaKey, HeadKey, creation_key, tape_key
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.arithmetic import with_arithmetic
from gradientmail_core.sim.judge import Judge
from gradientmail_core.sim.loop import Deadlock, VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.store import SimulatedStore, Weather
from gradientmail_core.sim.world import SimulatedNode, ToyModel

LEASE_SECONDS = 6.0
FAULT_SECONDS = 24.0
CALM_SECONDS = 25.0
LINGERS_ONE_IN = 16
DEADLINE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL, and a restart after ``down`` seconds (None: never)."""

    at: float
    node: int
    down: float | None


@dataclass(frozen=True, slots=True)
class Freeze:
    """The whole process stands still, as when suspended."""

    at: float
    node: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Partition:
    """One node cannot reach the store."""

    at: float
    node: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outage:
    """Nobody can reach the store."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """A trainer stands still while its process lives."""

    at: float
    node: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Junk:
    """A stranger's object appears under a key of the run."""

    at: float
    kind: str
    round: int


Fault: TypeAlias = Kill | Freeze | Partition | Outage | Hang | Junk


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides a run."""

    seed: int
    settings: DiLoCo
    speeds: tuple[float, ...]
    joins: tuple[float, ...]
    drifts: tuple[float, ...]
    weather: Weather
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a run: violated invariants, and how much happened."""

    seed: int
    violations: tuple[str, ...]
    rounds: int
    seconds: float


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    dice = random.Random(seed)
    nodes = dice.randint(1, 5)
    fragments = dice.choice((1, 2, 3, 4))
    settings = DiLoCo(
        sync_every=dice.choice((4, 6, 10)),
        fragments=fragments,
        in_flight=dice.randint(1, 3),
        overlap_steps=dice.choice((None, None, 0, 3, 10)),
        follow=dice.choice((None, False)),
        quorum_size=dice.randint(1, 3),
        grace_seconds=dice.choice((None, 0.0, 0.5, 2.0)),
    )
    return Scenario(
        seed=seed,
        settings=with_arithmetic(settings, random.Random(f"arithmetic {seed}")),
        speeds=tuple(dice.choice((0.2, 0.2, 0.3, 0.5)) for _ in range(nodes)),
        joins=tuple(0.0 if node == 0 else dice.choice((0.0, 0.0, dice.uniform(0, 16))) for node in range(nodes)),
        drifts=tuple(dice.uniform(0.97, 1.03) for _ in range(nodes)),
        weather=_weather(dice),
        faults=tuple(sorted((_fault(dice, nodes) for _ in range(dice.randint(0, 14))), key=lambda fault: fault.at)),
    )


def _weather(dice: random.Random) -> Weather:
    bad = dice.random()
    return Weather(
        latency=dice.choice((0.005, 0.05, 0.2)),
        bandwidth=dice.choice((1e4, 1e6, 1e8)),
        request_lost=bad * dice.choice((0.0, 0.02, 0.1)),
        answer_lost=bad * dice.choice((0.0, 0.02, 0.1)),
        write_late=bad * dice.choice((0.0, 0.02, 0.05)),
        listing_lags=dice.choice((0.0, 0.1, 0.3)),
    )


def _fault(dice: random.Random, nodes: int) -> Fault:
    at, node = dice.uniform(1, FAULT_SECONDS), dice.randrange(nodes)
    seconds = dice.choice((1.0, 4.0, 8.0, 16.0))
    match dice.randrange(8):
        case 0 | 1:
            return Kill(at, node, dice.choice((None, 0.5, 5.0)))
        case 2 | 3:
            return Freeze(at, node, seconds)
        case 4:
            return Partition(at, node, seconds)
        case 5:
            return Outage(at, seconds)
        case 6:
            return Hang(at, node, seconds)
        case _:
            return Junk(at, dice.choice(("delta", "tape", "head", "lease", "stray", "creation")), dice.randrange(60))


def play(script: Scenario) -> Verdict:
    """Run a scenario to its end; every violation found, and no exception."""
    try:
        return run_virtually(lambda loop: Arena(loop, script).play())
    except Deadlock as deadlock:
        return Verdict(script.seed, (f"deadlock: {deadlock}",), 0, 0.0)


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
        self._shared = MemoryMailbox("swarm")
        self._stores: dict[int, SimulatedStore] = {}
        self._nodes: dict[int, SimulatedNode] = {}
        self._lives = 0
        self._judge = Judge(self._shared, script.settings, loop)
        self._stopping = False

    async def play(self) -> Verdict:
        """Join, suffer, calm down, stop; then judge."""
        others = [asyncio.ensure_future(self._join(node, at)) for node, at in enumerate(self._script.joins)]
        others += [asyncio.ensure_future(self._strike(fault)) for fault in self._script.faults]
        watching = asyncio.ensure_future(self._judge.watch())
        await asyncio.gather(*others)
        await asyncio.sleep(max(FAULT_SECONDS - self._loop.time(), 0.0))
        self._calm()
        await self._judge.calm(self._living(), CALM_SECONDS, self._script.seed % LINGERS_ONE_IN == 0)
        watching.cancel()
        await self._finish()
        await self._judge.conclude(list(self._nodes.values()))
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
        store = SimulatedStore(self._shared, clock, seed, self._script.weather)
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
        )
        node.on_event = lambda event: self._tell(f"{self._loop.time():8.2f} {node.name} {event}")
        node.on_commit = self._judge.applied
        self._nodes[number] = node.launch()

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
            case Freeze(node=node, seconds=seconds):
                await self._freeze(node, seconds)
            case Hang(node=node, seconds=seconds):
                await self._hang(node, seconds)
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

    async def _junk(self, junk: Junk) -> None:
        keys = {
            "delta": DeltaKey(junk.round, "node-0").path,
            "tape": tape_key(junk.round, 0),
            "head": HeadKey(0, junk.round).path,
            "lease": "live/leases/node-0/0000000001-t0-nothex",
            "stray": f"live/deltas/readme-{junk.round}.txt",
            "creation": creation_key(junk.round % 3),
        }
        await self._shared.create(keys[junk.kind], b"not a record")

    def _calm(self) -> None:
        """End every fault; if nobody is left, one node comes back."""
        for store in self._stores.values():
            store.up = True
            store.weather = replace(store.weather, request_lost=0.0, answer_lost=0.0, write_late=0.0, listing_lags=0.0)
        for node in self._nodes.values():
            node.clock.thaw()
            node.paused = False
        if not self._living():
            self._launch(0)

    async def _finish(self) -> None:
        """Let every node end its loop and leave."""
        for node in self._living():
            node.steps = 0
        lives = [node.task for node in self._living() if node.task is not None]
        done, pending = await asyncio.wait(lives, timeout=DEADLINE_SECONDS)
        for task in pending:
            self._judge.violations.append("a node did not leave")
            task.cancel()
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                self._judge.violations.append(f"a node failed: {task.exception()!r}")
