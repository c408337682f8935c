"""A fleet over hours: what share of its time trains, what becomes of the tokens, what the store is asked.

The production engine runs on virtual time with a toy model whose payloads weigh what the real model's would, so
stalls, bytes and requests come out of the protocol itself and not out of a formula. Nodes fail by a schedule; the
same schedule tells what a lock-step run, in which a failure of one stops all, would have made of it.
"""

import asyncio
import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeAlias

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.mailbox.retrying import RetryPolicy
from gradientmail_core.protocol.keys import MANIFEST
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.protocol.records import RoundRecord
from gradientmail_core.sim.checks import tape
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.scenario import Fault, Freeze, Hang, Kill, Partition, Slow
from gradientmail_core.sim.stage import Stage
from gradientmail_core.sim.store import SharedStore, SimulatedStore, Traffic, Weather
from gradientmail_core.sim.world import SimulatedNode, ToyModel

PAYLOADS = ("live/deltas/", "blobs/")
DEADLINE_SECONDS = 30.0
LOOK_SECONDS = 0.5
CLOCKS_APART = 1e4
PARTS = 100
LINE = Weather(latency=0.03, ordered=True)
Schedule: TypeAlias = tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """What to run, for ``seconds``. ``tokens`` are those of a node's step; ``jitter`` is the spread of node speeds.

    ``delta_bytes`` and ``commit_bytes`` are what one fragment's snapshot and each payload of its commit weigh; 0
    leaves the toy's own bytes.
    """

    nodes: int
    settings: DiLoCo
    seconds: float
    step_seconds: float = 1.0
    jitter: float = 0.0
    tokens: int = 1024
    weather: Weather = LINE
    lease: float = 30.0
    delta_bytes: int = 0
    commit_bytes: int = 0
    faults: Schedule = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it in ``seconds``, counted from when the nodes began to train.

    ``rounds`` were committed with participants, of ``due_rounds`` that the run's clock passed by a gap between rounds.
    ``trained_seconds`` and ``stalled_seconds`` add up over the nodes, ``tokens_merged`` over the snapshots.
    """

    fleet: Fleet
    seconds: float
    trained_seconds: float
    stalled_seconds: float
    tokens_trained: int
    tokens_merged: float
    rounds: int
    due_rounds: int
    participants: float
    failed: int
    traffic: Traffic

    @property
    def goodput(self) -> float:
        """Share of all nodes' time that was spent training."""
        return self.trained_seconds / (self.fleet.nodes * self.seconds)

    @property
    def utilization(self) -> float:
        """Share of the living nodes' time that was not spent waiting for commits."""
        return self.trained_seconds / max(self.trained_seconds + self.stalled_seconds, 1e-9)

    @property
    def merged_share(self) -> float:
        """Share of trained tokens that were merged."""
        return self.tokens_merged / max(self.tokens_trained, 1)

    @property
    def committed_share(self) -> float:
        """Share of due rounds that were committed."""
        return min(self.rounds / max(self.due_rounds, 1), 1.0)


def failures(nodes: int, seconds: float, up: float, down: float, seed: int) -> Schedule:
    """Each node fails after exponential times of mean ``up`` seconds and is down for ``down`` seconds."""
    dice = random.Random(f"failures {seed}")
    faults: list[Fault] = []
    for node in range(nodes):
        at = dice.expovariate(1 / up)
        while at < seconds:
            faults.append(Kill(at, node, down))
            at += down + dice.expovariate(1 / up)
    return tuple(sorted(faults, key=lambda fault: fault.at))


def storm(nodes: int, seconds: float, per_hour: float, seed: int) -> Schedule:
    """Faults of every passing kind on nodes drawn at random, ``per_hour`` in all."""
    dice = random.Random(f"storm {seed}")
    faults: list[Fault] = []
    at = dice.expovariate(per_hour / 3600)
    while at < seconds:
        node, lasting = dice.randrange(nodes), dice.uniform(5.0, 45.0)
        kinds = (
            Kill(at, node, lasting),
            Freeze(at, node, lasting),
            Partition(at, node, lasting),
            Hang(at, node, lasting),
            Slow(at, node, lasting, 3.0),
        )
        faults.append(dice.choice(kinds))
        at += dice.expovariate(per_hour / 3600)
    return tuple(faults)


def lock_step_goodput(nodes: int, seconds: float, up: float, down: float, seed: int) -> float:
    """The share of time that trains if any node's failure stops all: each fails by its own training time."""
    dice = random.Random(f"lock step {seed}")
    nexts = [dice.expovariate(1 / up) for _ in range(nodes)]
    now = trained = 0.0
    while now < seconds:
        first = min(range(nodes), key=nexts.__getitem__)
        step = min(nexts[first] - trained, seconds - now)
        trained, now = trained + step, now + step + down
        nexts[first] = trained + dice.expovariate(1 / up)
    return trained / max(now, seconds)


def run(fleet: Fleet, progress: Callable[[float], None] = lambda share: None) -> Outcome:
    """Run a fleet to its end; ``progress`` hears a hundred times what share of its time has passed."""
    with _uncollected():
        return run_virtually(lambda loop: Voyage(loop, fleet, progress).whole())


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles, which would walk through all nodes again and again and find next to nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Voyage(Stage):
    """A fleet under way."""

    def __init__(self, loop: VirtualLoop, fleet: Fleet, progress: Callable[[float], None] = lambda share: None) -> None:
        super().__init__(loop, SharedStore("fleet"), fleet.settings.fragments)
        self._fleet = fleet
        self._progress = progress
        self._dice = random.Random(f"fleet {fleet.seed}")
        self._speeds = [self._speed() for _ in range(fleet.nodes)]
        self._all: list[SimulatedNode] = []
        self._seconds = 0.0

    async def whole(self) -> Outcome:
        """Launch everybody, let the faults strike, and count at the end of the time."""
        for number in range(self._fleet.nodes):
            self.launch(number)
        began = await self._all_begun()
        strikes = [asyncio.ensure_future(self.strike(fault)) for fault in self._fleet.faults]
        for part in range(PARTS):
            await asyncio.sleep(self._fleet.seconds / PARTS)
            self._progress((part + 1) / PARTS)
        self._seconds = self.loop.time() - began
        for strike in strikes:
            strike.cancel()
        failed = [node for node in self._all if _failed(node)]
        records = await tape(self.shared) if await self.shared.get(MANIFEST) is not None else []
        outcome = self._outcome(records, len(failed))
        for node in self.living():
            await node.kill()
        return outcome

    async def _all_begun(self) -> float:
        """Wait until every node trains; their mean time of beginning."""
        while any(node.began_at is None and not _failed(node) for node in self._all):
            await asyncio.sleep(LOOK_SECONDS)
        return fmean(
            self.loop.time() if node.began_at is None else node.began_at - number * CLOCKS_APART
            for number, node in enumerate(self._all)
        )

    def launch(self, number: int) -> None:
        """See :meth:`Stage.launch`."""
        fleet = self._fleet
        self.lives += 1
        seed = fleet.seed * 1_000_003 + self.lives
        clock = VirtualClock(self.loop, offset=number * CLOCKS_APART)
        store = SimulatedStore(self.shared, clock, seed, fleet.weather, self._size)
        self.connected(number, store)
        patience = DEADLINE_SECONDS + 4 * max(fleet.delta_bytes, fleet.commit_bytes) / fleet.weather.bandwidth
        node = SimulatedNode(
            f"node-{number}",
            store,
            fleet.settings,
            clock,
            seed,
            steps=10**9,
            step_seconds=self._speeds[number],
            tokens=fleet.tokens,
            timeouts=Timeouts(lease=fleet.lease),
            model=ToyModel(tensors=max(fleet.settings.fragments, 4), elements=8),
            policy=RetryPolicy(deadline=patience),
            keeps_events=False,
        )
        self.nodes[number] = node
        self._all.append(node)
        node.launch()

    def _speed(self) -> float:
        return self._fleet.step_seconds * (1.0 + self._fleet.jitter * self._dice.uniform(-1.0, 1.0))

    def _size(self, key: str, length: int) -> int:
        if key.startswith("live/deltas/"):
            return self._fleet.delta_bytes or length
        return self._fleet.commit_bytes or length if key.startswith("blobs/") else length

    def _outcome(self, records: Sequence[RoundRecord], failed: int) -> Outcome:
        fleet, full = self._fleet, [record for record in records if not record.void]
        trained = [node.learner.state for node in self._all if node.learner is not None]
        chains = {record.round % fleet.settings.fragments: record.merged_tokens for record in full}
        clock = max((state.global_step for state in trained), default=0)
        return Outcome(
            fleet=fleet,
            seconds=self._seconds,
            trained_seconds=sum(node.trained_seconds for node in self._all),
            stalled_seconds=sum(node.stall_seconds for node in self._all),
            tokens_trained=sum(state.tokens for state in trained),
            tokens_merged=sum(chains.values()) / fleet.settings.fragments,
            rounds=len(full),
            due_rounds=max(clock * fleet.settings.fragments // fleet.settings.sync_every - 1, 0),
            participants=sum(record.headcount for record in full) / max(len(full), 1),
            failed=failed,
            traffic=self.traffic,
        )


def _failed(node: SimulatedNode) -> bool:
    task = node.task
    return task is not None and task.done() and not task.cancelled() and task.exception() is not None


def goodput_fleet(minutes: float, seed: int, up: float = 60.0, down: float = 8.0) -> Fleet:
    """Eight nodes that are each down for 8 s in every 60 s of being up (Decoupled DiLoCo's failures, scaled down)."""
    seconds = 60.0 * minutes
    return Fleet(
        nodes=8,
        settings=DiLoCo(sync_every=40, fragments=4),
        seconds=seconds,
        step_seconds=0.25,
        lease=12.0,
        faults=failures(8, seconds, up, down, seed),
        seed=seed,
    )


def storm_fleet(minutes: float, seed: int, nodes: int = 32, per_hour: float = 125.0) -> Fleet:
    """32 nodes under 125 faults an hour, of every passing kind."""
    seconds = 60.0 * minutes
    return replace(
        Fleet(nodes=nodes, settings=DiLoCo(sync_every=60, fragments=4), seconds=seconds, seed=seed, jitter=0.05),
        faults=storm(nodes, seconds, per_hour, seed),
    )
