"""Random runs with everything going wrong, judged by the protocol's invariants.

A scenario (:mod:`gradientmail_core.sim.scenario`) is played on virtual time with the production engine: nodes join,
suffer their faults (kills at any await, restarts, freezes, partitions, outages, hung, slow and poisoned trainers,
garbage and replayed objects under any prefix); then faults stop and the run must come back. What is checked, all
along and at the end, is in :mod:`gradientmail_core.sim.judge`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from gradientmail_core.events import Event
from gradientmail_core.mailbox.retrying import RetryPolicy
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.judge import Judge
from gradientmail_core.sim.loop import Deadlock, VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.scenario import (
    FAULT_SECONDS,
    Scenario,
)
from gradientmail_core.sim.stage import Stage
from gradientmail_core.sim.store import SharedStore, SimulatedStore, Weather
from gradientmail_core.sim.world import SimulatedNode, ToyModel

LEASE_SECONDS = 6.0
CALM_SECONDS = 25.0
DEADLINE_SECONDS = 3600.0
REQUEST_DEADLINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a run: violated invariants, how much happened, and a digest of all that was committed."""

    seed: int
    violations: tuple[str, ...]
    rounds: int
    seconds: float
    tape: str = ""


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


class Arena(Stage):
    """One run being played; ``tell`` hears every event."""

    def __init__(self, loop: VirtualLoop, script: Scenario, tell: Callable[[str], None] = lambda line: None) -> None:
        self._judge = Judge(script.settings, loop)
        super().__init__(loop, SharedStore("swarm", self._judge.wrote, self._judge.removing), script.settings.fragments)
        self._judge.watches(self.shared)
        self._tell = tell
        self._script = script
        self._is_calm = False

    async def play(self) -> Verdict:
        """Join, suffer, calm down, stop; then judge."""
        others = [asyncio.ensure_future(self._join(node, at)) for node, at in enumerate(self._script.joins)]
        others += [asyncio.ensure_future(self.strike(fault)) for fault in self._script.faults]
        watching = asyncio.ensure_future(self._judge.watch())
        await asyncio.gather(*others)
        await asyncio.sleep(max(FAULT_SECONDS - self.loop.time(), 0.0))
        self._calm()
        await self._judge.calm(self, CALM_SECONDS, self._script.lingers)
        watching.cancel()
        await self._finish()
        await self._judge.conclude()
        rounds, tape = await self._judge.rounds(), await self._judge.tape_digest()
        return Verdict(self._script.seed, tuple(self._judge.violations), rounds, self.loop.time(), tape)

    async def _join(self, number: int, at: float) -> None:
        await asyncio.sleep(at)
        self.launch(number)

    def launch(self, number: int) -> None:
        self.lives += 1
        seed = self._script.seed * 1000 + self.lives
        clock = VirtualClock(self.loop, offset=number * 1e5, rate=self._script.drifts[number])
        store = SimulatedStore(self.shared, clock, seed, self._weather(number))
        self.connected(number, store)
        node = SimulatedNode(
            f"node-{number}",
            store,
            self._script.settings,
            clock,
            seed,
            steps=10**9,
            step_seconds=self._script.speeds[number],
            role=self._script.role(number),
            timeouts=Timeouts(lease=LEASE_SECONDS, progress=15.0),
            model=ToyModel(tensors=4, elements=8),
            policy=RetryPolicy(deadline=REQUEST_DEADLINE_SECONDS),
        )
        node.on_event = lambda event: self._heard(node, event)
        self.nodes[number] = node
        self._judge.born(node)
        node.launch()

    def _weather(self, number: int) -> Weather:
        weather = self._script.weather
        return (
            weather.calm() if self._is_calm else replace(weather, latency=weather.latency * self._script.lines[number])
        )

    def _heard(self, node: SimulatedNode, event: Event) -> None:
        self._tell(f"{self.loop.time():8.2f} {node.name} {event}")
        self._judge.heard(event)

    def _calm(self) -> None:
        """End every fault; if nobody is left, one node comes back."""
        self._is_calm = True
        for number, store in self.stores.items():
            store.up, store.cut = True, None
            store.weather = self._weather(number)
        for node in self.nodes.values():
            node.clock.thaw()
            node.paused = False
        if not self.living():
            self.launch(0)

    async def _finish(self) -> None:
        """Let every node end its loop and leave."""
        self._judge.may_leave = True
        for node in self.living():
            node.steps = 0
        lives = [node.task for node in self.living() if node.task is not None]
        if not lives:
            return self._judge.violated("no node lives")
        _, pending = await asyncio.wait(lives, timeout=DEADLINE_SECONDS)
        for task in pending:
            self._judge.violated("a node did not leave")
            task.cancel()
