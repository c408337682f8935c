"""What a seed draws: a configuration, a weather and a schedule of faults, as one value.

Every kind of fault is drawn often, and some seeds are drawn towards a corner: a long line for one node, many quick
restarts under writes that land late, learners that wait for each other, trainers that go wrong. A scenario is all
that decides a run, so a failing one can be played again, and shrunk by leaving parts of it out.
"""

import random
from dataclasses import dataclass, replace
from typing import TypeAlias

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.roles import Role
from gradientmail_core.sim.arithmetic import with_arithmetic
from gradientmail_core.sim.membership import drawn_roles, with_membership
from gradientmail_core.sim.store import Weather

FAULT_SECONDS = 24.0
LINGERS_ONE_IN = 16
LONG_LINE_SECONDS = 0.6
JUNK = ("delta", "tape", "head", "lease", "stray", "creation", "replay", "replay")


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL, and a restart after ``down`` seconds (None: never)."""

    at: float
    node: int
    down: float | None


@dataclass(frozen=True, slots=True)
class Cut:
    """SIGKILL while the next commit is on its way, which lands later, and a restart after ``down`` seconds."""

    at: float
    node: int
    down: float


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
class Slow:
    """A trainer takes ``times`` as long for each step."""

    at: float
    node: int
    seconds: float
    times: float


@dataclass(frozen=True, slots=True)
class Poison:
    """A trainer's parameters go wrong: every value becomes ``value``."""

    at: float
    node: int
    value: float


@dataclass(frozen=True, slots=True)
class Junk:
    """A stranger's object appears under a key of the run: garbage, or an older object of the run itself."""

    at: float
    kind: str
    round: int


Fault: TypeAlias = Kill | Cut | Freeze | Partition | Outage | Hang | Slow | Poison | Junk


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides a run.

    For each node: seconds per step, when it joins, how fast its clock runs, how many times the weather's latency its
    line has, and its role. ``lingers`` is whether the calm at the end goes on after everything has recovered.
    """

    seed: int
    settings: DiLoCo
    speeds: tuple[float, ...]
    joins: tuple[float, ...]
    drifts: tuple[float, ...]
    lines: tuple[float, ...]
    weather: Weather
    faults: tuple[Fault, ...]
    lingers: bool = False
    roles: tuple[Role, ...] = ()

    def role(self, node: int) -> Role:
        """What a node takes upon itself."""
        return self.roles[node] if self.roles else "both"


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    dice = random.Random(seed)
    nodes = dice.randint(1, 5)
    membership = random.Random(f"membership {seed}")
    drawn = with_membership(_settings(dice), membership)
    script = Scenario(
        seed=seed,
        settings=with_arithmetic(drawn, random.Random(f"arithmetic {seed}")),
        speeds=tuple(dice.choice((0.2, 0.2, 0.3, 0.5)) for _ in range(nodes)),
        joins=tuple(0.0 if node == 0 else dice.choice((0.0, 0.0, dice.uniform(0, 16))) for node in range(nodes)),
        drifts=tuple(dice.uniform(0.97, 1.03) for _ in range(nodes)),
        lines=(1.0,) * nodes,
        weather=_weather(dice),
        faults=tuple(_fault(dice, nodes) for _ in range(dice.randint(0, 14))),
        lingers=seed % LINGERS_ONE_IN == 0,
        roles=drawn_roles(nodes, membership),
    )
    return _in_order(_towards_a_corner(script, dice))


def _settings(dice: random.Random) -> DiLoCo:
    return DiLoCo(
        sync_every=dice.choice((4, 6, 10)),
        fragments=dice.choice((1, 2, 3, 4)),
        in_flight=dice.randint(1, 3),
        overlap_steps=dice.choice((None, None, 0, 3, 10)),
        follow=dice.choice((None, False)),
        quorum_size=dice.randint(1, 3),
        grace_seconds=dice.choice((None, 0.0, 0.5, 2.0)),
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
        undecided=bad * dice.choice((0.0, 0.1)),
        throttled=bad * dice.choice((0.0, 0.05)),
        silent=bad * dice.choice((0.0, 0.0, 0.01)),
        unfound=bad * dice.choice((0.0, 0.05)),
    )


def _fault(dice: random.Random, nodes: int) -> Fault:
    at, node = dice.uniform(1, FAULT_SECONDS), dice.randrange(nodes)
    seconds = dice.choice((1.0, 4.0, 8.0, 16.0))
    match dice.randrange(11):
        case 0 | 1:
            return Kill(at, node, dice.choice((None, 0.5, 5.0)))
        case 9:
            return Cut(at, node, dice.choice((0.1, 0.5, 5.0)))
        case 2 | 3:
            return Freeze(at, node, seconds)
        case 4:
            return Partition(at, node, seconds)
        case 5:
            return Outage(at, seconds)
        case 6:
            return Hang(at, node, seconds)
        case 7:
            return Slow(at, node, seconds, dice.choice((2.0, 5.0)))
        case 8:
            return Poison(at, node, dice.choice((float("nan"), float("inf"), 1e6)))
        case _:
            return Junk(at, dice.choice(JUNK), dice.randrange(60))


def _towards_a_corner(script: Scenario, dice: random.Random) -> Scenario:
    """Half of the seeds as they are, the others pushed to where one rule of the protocol alone holds the run up."""
    nodes = len(script.speeds)
    match dice.randrange(10):
        case 0:
            quick = tuple(Cut(dice.uniform(2, FAULT_SECONDS), dice.randrange(nodes), 0.1) for _ in range(6))
            return replace(script, faults=script.faults[:4] + quick)
        case 1:
            return _slow_joiner(script, dice) if nodes > 1 else script
        case 2:
            wrong = tuple(Poison(dice.uniform(2, FAULT_SECONDS), dice.randrange(nodes), float("nan")) for _ in range(6))
            return replace(script, faults=script.faults + wrong)
        case 3:
            replays = tuple(Junk(dice.uniform(2, FAULT_SECONDS), "replay", 0) for _ in range(8))
            return replace(script, faults=script.faults + replays)
        case 4:
            frozen = tuple(Freeze(dice.uniform(2, FAULT_SECONDS), dice.randrange(nodes), 8.0) for _ in range(4))
            settings = replace(script.settings, fragments=4, sync_every=4, grace_seconds=0.0)
            return replace(script, settings=settings, faults=script.faults + frozen)
        case _:
            return script


def _slow_joiner(script: Scenario, dice: random.Random) -> Scenario:
    """The last node joins a run of quick rounds over a long but faultless line."""
    nodes, weather = len(script.speeds), replace(script.weather.calm(), listing_lags=script.weather.listing_lags)
    return replace(
        script,
        settings=replace(script.settings, sync_every=4, grace_seconds=0.0, quorum_size=1, overlap_steps=None),
        speeds=(0.2,) * nodes,
        joins=(*script.joins[:-1], dice.uniform(6, 20)),
        lines=(*script.lines[:-1], LONG_LINE_SECONDS / weather.latency),
        weather=weather,
        faults=tuple(fault for fault in script.faults if isinstance(fault, Hang | Slow | Junk)),
    )


def _in_order(script: Scenario) -> Scenario:
    return replace(script, faults=tuple(sorted(script.faults, key=lambda fault: fault.at)))
