"""Random gossip runs with everything going wrong: ``python -m gradientmail_core.sim.gossip_swarm --seeds 1000``.

A seed draws mixes, nodes, speeds, clocks, a weather and a schedule of faults: kills at any await with or without a
restart, processes and trainers that stand still, partitions, outages, garbage under any key. Then faults stop. All
along and at the end it must hold that

1. nobody hangs: in the calm every living node ends rounds, and at the end every node leaves;
2. nobody fails, and nobody waits for Mix2 longer than the time-out; without Mix2 nobody ever waits;
3. the mean does not run away: nodes descend a noisy bowl, and all end near its bottom;
4. the two newest means of every fragment can be read, at any moment;
5. the mailbox stays within its bound.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, assert_never

import numpy as np

from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.algorithms.mixing import All, Mix, Nothing, Pair, Peers
from gradientmail_core.algorithms.outer import Nesterov
from gradientmail_core.engine.gossip_roster import Listed
from gradientmail_core.engine.gossip_sweeping import kept_means
from gradientmail_core.events import Event, RoundMixed
from gradientmail_core.mailbox.memory import MemoryMailbox
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.gossip import GOSSIP, MeanKey, RosterKey, ShareKey, parse_gossip, parse_mean
from gradientmail_core.protocol.keys import MANIFEST
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.protocol.records import Manifest, parse_manifest
from gradientmail_core.sim.gossip import Bowl, SimulatedGossip
from gradientmail_core.sim.loop import Deadlock, VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.store import SimulatedStore, Weather

LEASE_SECONDS = 6.0
FAULT_SECONDS = 40.0
CALM_SECONDS = 40.0
WATCH_SECONDS = 2.0
DEADLINE_SECONDS = 3600.0
WAIT_SLACK_SECONDS = 2.0
NEAR_BOTTOM = 0.5
ROUNDS_KEPT = 6

FaultKind: TypeAlias = Literal["kill", "freeze", "partition", "outage", "hang", "junk"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls ``node`` at a time, for so many seconds; a killed node is down for them, for ever if None."""

    kind: FaultKind
    at: float
    node: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides a run."""

    seed: int
    settings: FactoredGossip
    speeds: tuple[float, ...]
    joins: tuple[float, ...]
    drifts: tuple[float, ...]
    weather: Weather
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a run: what was violated, and how many rounds were played."""

    seed: int
    violations: tuple[str, ...]
    rounds: int


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    dice = random.Random(seed)
    nodes = dice.randint(1, 6)
    bad = dice.random()
    return Scenario(
        seed=seed,
        settings=_settings(dice),
        speeds=tuple(dice.choice((0.1, 0.1, 0.15, 0.4)) for _ in range(nodes)),
        joins=tuple(0.0 if node == 0 else dice.choice((0.0, 0.0, dice.uniform(0, 30))) for node in range(nodes)),
        drifts=tuple(dice.uniform(0.97, 1.03) for _ in range(nodes)),
        weather=Weather(
            latency=dice.choice((0.005, 0.05, 0.2)),
            bandwidth=dice.choice((1e4, 1e6, 1e8)),
            request_lost=bad * dice.choice((0.0, 0.02, 0.1)),
            answer_lost=bad * dice.choice((0.0, 0.02, 0.1)),
            write_late=bad * dice.choice((0.0, 0.02, 0.05)),
            listing_lags=dice.choice((0.0, 0.1, 0.3)),
        ),
        faults=tuple(sorted((_fault(dice, nodes) for _ in range(dice.randint(0, 14))), key=lambda fault: fault.at)),
    )


def _settings(dice: random.Random) -> FactoredGossip:
    mix1: Mix = dice.choice((All(), All(), All(), Pair(), Peers(2)))
    mix2: Mix = dice.choice((Nothing(), Nothing(), Pair(), Pair(), Peers(2), All()))
    return FactoredGossip(
        sync_every=dice.choice((8, 12, 20)),
        fragments=dice.randint(1, 4),
        mix1=mix1,
        mix2=mix2,
        mix2_on=dice.choice(((), ("@blocks:2",))),
        outer=Nesterov(lr=0.7, momentum=dice.choice((0.0, 0.5, 0.9))),
        timeout=dice.choice((0.5, 2.0, 6.0)),
        rounds=dice.choice((1, 1, 2)),
        average_momentum=dice.random() < 0.1,
        follow=dice.random() < 0.8,
        mean_every=dice.choice((2, 5)),
        delta_codec=dice.choice(("F32", "BF16", "F8_E4M3", "INT4")),
        mean_codec=dice.choice(("F32", "BF16")),
    )


def _fault(dice: random.Random, nodes: int) -> Fault:
    kind: FaultKind = dice.choice(("kill", "kill", "freeze", "freeze", "partition", "outage", "hang", "junk", "junk"))
    seconds = dice.choice((None, 0.5, 5.0)) if kind == "kill" else dice.choice((1.0, 4.0, 10.0, 20.0))
    return Fault(kind, dice.uniform(1, FAULT_SECONDS), dice.randrange(nodes), seconds)


def play(script: Scenario) -> Verdict:
    """Run a scenario to its end; every violation found, and no exception."""
    try:
        return run_virtually(lambda loop: GossipArena(loop, script).play())
    except Deadlock as deadlock:
        return Verdict(script.seed, (f"deadlock: {deadlock}",), 0)


def story(script: Scenario, tell: Callable[[str], None]) -> Verdict:
    """Run a scenario and tell every event of every node as it happens."""
    tell(str(script))
    return run_virtually(lambda loop: GossipArena(loop, script, tell).play())


class GossipArena:
    """One run being played; ``tell`` hears every event."""

    def __init__(self, loop: VirtualLoop, script: Scenario, tell: Callable[[str], None] = lambda line: None) -> None:
        self._loop = loop
        self._script = script
        self._tell = tell
        self._dice = random.Random(script.seed + 1)
        self._shared = MemoryMailbox("swarm")
        self._stores: dict[int, SimulatedStore] = {}
        self._nodes: dict[int, SimulatedGossip] = {}
        self._lives = 0
        self._is_calm = False
        self._violations: list[str] = []

    async def play(self) -> Verdict:
        """Join, suffer, calm down, stop; then judge."""
        others = [asyncio.ensure_future(self._join(node, at)) for node, at in enumerate(self._script.joins)]
        others += [asyncio.ensure_future(self._strike(fault)) for fault in self._script.faults]
        watching = asyncio.ensure_future(self._watch())
        await asyncio.gather(*others)
        await asyncio.sleep(max(FAULT_SECONDS - self._loop.time(), 0.0))
        self._calm()
        await self._judge_calm()
        await self._finish()
        watching.cancel()
        await self._check_means()
        rounds = max((node.learner.state.round for node in self._nodes.values() if node.learner is not None), default=0)
        return Verdict(self._script.seed, tuple(self._violations), rounds)

    def _violated(self, what: str) -> None:
        if what not in self._violations:
            self._violations.append(what)

    def _living(self) -> list[SimulatedGossip]:
        return [node for node in self._nodes.values() if node.task is not None and not node.task.done()]

    # -- nodes and faults ----------------------------------------------------------------------------------

    async def _join(self, number: int, at: float) -> None:
        await asyncio.sleep(at)
        self._launch(number)

    def _launch(self, number: int) -> None:
        self._lives += 1
        seed = self._script.seed * 1000 + self._lives
        clock = VirtualClock(self._loop, offset=number * 1e5, rate=self._script.drifts[number])
        store = SimulatedStore(self._shared, clock, seed, self._script.weather)
        store.up = number not in self._stores or self._stores[number].up
        if self._is_calm:
            store.weather = _clear(store.weather)
        self._stores[number] = store
        node = SimulatedGossip(
            f"node-{number}",
            store,
            self._script.settings,
            clock,
            seed,
            steps=10**9,
            step_seconds=self._script.speeds[number],
            timeouts=Timeouts(lease=LEASE_SECONDS, progress=15.0),
            model=Bowl(elements=8, sigma=0.05),
        )
        node.on_event = lambda event: self._heard(node, event)
        self._nodes[number] = node.launch()

    def _heard(self, node: SimulatedGossip, event: Event) -> None:
        self._tell(f"{self._loop.time():8.2f} {node.name} {event}")
        settings = self._script.settings
        if (
            isinstance(event, RoundMixed)
            and self._is_calm
            and event.seconds > 2 * settings.timeout + WAIT_SLACK_SECONDS
        ):
            self._violated(f"{node.name} waited {event.seconds:.1f} s for gradients")

    async def _strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        seconds = 0.0 if fault.seconds is None else fault.seconds
        match fault.kind:
            case "kill":
                await self._kill(fault.node, fault.seconds)
            case "freeze":
                await self._freeze(fault.node, seconds)
            case "partition":
                await self._cut([fault.node] if fault.node in self._stores else [], seconds)
            case "outage":
                await self._cut(list(self._stores), seconds)
            case "hang":
                await self._hang(fault.node, seconds)
            case "junk":
                await self._junk()
            case _:
                assert_never(fault.kind)

    async def _kill(self, number: int, down: float | None) -> None:
        if number in self._nodes:
            await self._nodes[number].kill()
            if down is not None:
                await asyncio.sleep(down)
                task = self._nodes[number].task
                if task is None or task.done():
                    self._launch(number)

    async def _freeze(self, number: int, seconds: float) -> None:
        if number in self._nodes:
            clock = self._nodes[number].clock
            clock.freeze()
            await asyncio.sleep(seconds)
            clock.thaw()

    async def _cut(self, numbers: list[int], seconds: float) -> None:
        for number in numbers:
            self._stores[number].up = False
        await asyncio.sleep(seconds)
        for number in numbers:
            self._stores[number].up = True

    async def _hang(self, number: int, seconds: float) -> None:
        if number in self._nodes:
            node = self._nodes[number]
            node.paused = True
            await asyncio.sleep(seconds)
            node.paused = False

    async def _junk(self) -> None:
        """A stranger's object under a key that a round of now or soon will need, or far ahead."""
        newest = max((node.learner.state.round for node in self._nodes.values() if node.learner is not None), default=0)
        round = newest + self._dice.choice((0, 1, 2, 500))
        key = self._dice.choice(
            (
                RosterKey(round),
                MeanKey(round, 0),
                MeanKey(round, 0, full=True),
                ShareKey(round, "start", 0, "node-0"),
                ShareKey(round, "grad", 0, "node-1"),
                ShareKey(round, "mix2", 0, "node-0"),
            )
        )
        await self._shared.create(key.path, b"not a record")

    # -- judging -------------------------------------------------------------------------------------------

    def _calm(self) -> None:
        """End every fault; if nobody is left, one node comes back."""
        self._is_calm = True
        for store in self._stores.values():
            store.up = True
            store.weather = _clear(store.weather)
        for node in self._nodes.values():
            node.clock.thaw()
            node.paused = False
        if not self._living():
            self._launch(0)

    async def _judge_calm(self) -> None:
        await asyncio.sleep(CALM_SECONDS / 2)
        ended = {node.name: _rounds_ended(node) for node in self._living()}
        await asyncio.sleep(CALM_SECONDS / 2)
        for node in self._living():
            if _rounds_ended(node) <= ended.get(node.name, 0):
                self._violated(f"{node.name} ended no round for {CALM_SECONDS / 2:.0f} s of calm")
            if not self._script.settings.blocking and node.stall_seconds > 0:
                self._violated(f"{node.name} waited where nothing is to be waited for")
            apart = float(np.abs(node.model.flat() - 1.0).max()) if isinstance(node.model, Bowl) else 0.0
            if not apart < NEAR_BOTTOM:
                self._violated(f"{node.name} is {apart:.2f} from the bottom")
        await self._check_size()

    async def _finish(self) -> None:
        """Let every node end its loop and leave."""
        for node in self._living():
            node.steps = 0
        lives = [node.task for node in self._living() if node.task is not None]
        done, pending = await asyncio.wait(lives, timeout=DEADLINE_SECONDS)
        for task in pending:
            self._violated("a node did not leave")
            task.cancel()
        for node in self._nodes.values():
            failed = node.task is not None and node.task in done and not node.task.cancelled()
            if failed and node.task is not None and node.task.exception() is not None:
                self._violated(f"{node.name} failed: {node.task.exception()!r}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self._check_means()

    async def _check_means(self) -> None:
        """The two newest means of every fragment, and what the run began from, can be read."""
        body = await self._shared.get(MANIFEST)
        if body is None:
            return
        manifest = parse_manifest(body)
        assert isinstance(manifest, Manifest), manifest
        keys = [key for entry in await self._listed(GOSSIP) if (key := parse_gossip(entry)) is not None]
        for key in kept_means(Listed(tuple(keys)), len(manifest.plan)):
            record = parse_mean(await self._shared.get(key.path) or b"", manifest.run, key)
            if isinstance(record, Rejected):
                continue
            if await self._shared.get(record.payload.key) is None:
                self._violated(f"fragment {key.fragment} misses a payload of its two newest means")
        for section in manifest.theta:
            if await self._shared.get(section.key) is None:
                self._violated("the initial parameters are gone")

    async def _check_size(self) -> None:
        settings, nodes = self._script.settings, len(self._script.speeds)
        gossip = await self._listed(GOSSIP)
        a_round = 2 + settings.fragments * (2 + (2 * settings.rounds + 1) * nodes)
        if len(gossip) > ROUNDS_KEPT * a_round + 16:
            self._violated(f"{len(gossip)} objects lie under {GOSSIP}, {a_round} a round")
        payloads = await self._listed("blobs/")
        age = settings.mean_every + ROUNDS_KEPT
        if len(payloads) > settings.fragments * (1 + 4 * (2 + age)):
            self._violated(f"{len(payloads)} payloads lie under blobs/")

    async def _listed(self, prefix: str) -> list[str]:
        return [entry.key async for entry in self._shared.list(prefix)]


def _rounds_ended(node: SimulatedGossip) -> int:
    return sum(isinstance(event, RoundMixed) for _, event in node.events)


def _clear(weather: Weather) -> Weather:
    return replace(weather, request_lost=0.0, answer_lost=0.0, write_late=0.0, listing_lags=0.0)


def main() -> int:
    """Play seeds, print every violation; exit code 1 if there was any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="play this one and tell its story")
    options = parser.parse_args()
    if options.seed is not None:
        verdict = story(scenario(options.seed), print)
        print(verdict)
        return 1 if verdict.violations else 0
    violated = rounds = 0
    for seed in range(options.first, options.first + options.seeds):
        verdict = play(scenario(seed))
        rounds += verdict.rounds
        violated += bool(verdict.violations)
        if verdict.violations:
            print(f"seed {seed}: {'; '.join(verdict.violations)}", flush=True)
    print(f"{options.seeds} seeds, {rounds} rounds, {violated} violated", flush=True)
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
