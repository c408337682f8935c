"""Play many random runs side by side and say what broke, with the shortest schedule that breaks it.

Each seed is a whole run with faults (:mod:`gradientmail_core.sim.swarm`), and seeds share nothing, so they are played
in as many processes as there are cores. What fails is shrunk before it is shown: the story of three nodes and one
fault is read in a minute, that of five nodes and twenty is not read at all.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

from gradientmail_core.sim.scenario import Scenario, scenario
from gradientmail_core.sim.shrinking import shrunk
from gradientmail_core.sim.swarm import Verdict, play, story

REPORT_SECONDS = 5.0
AGAIN_ONE_IN = 16
SEEDS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is."""

    done: int
    count: int
    violated: int
    seeds_per_second: float


def verdict(seed: int) -> Verdict:
    """The verdict on one seed. Some are played twice, to see that a seed gives one tape."""
    script = scenario(seed)
    result = play(script)
    if seed % AGAIN_ONE_IN == AGAIN_ONE_IN - 1 and play(script) != result:
        return replace(result, violations=(*result.violations, "played again it ends otherwise"))
    return result


def verdicts(first: int, count: int, processes: int) -> Iterator[Verdict]:
    """Verdicts of ``count`` seeds, in order, from several processes."""
    seeds = range(first, first + count)
    if processes <= 1:
        yield from map(verdict, seeds)
        return
    fresh = multiprocessing.get_context("spawn")  # a fork would share locks of the caller's threads
    with ProcessPoolExecutor(processes, mp_context=fresh) as pool:
        yield from pool.map(verdict, seeds, chunksize=SEEDS_AT_ONCE)


def search(
    first: int,
    count: int,
    processes: int,
    *,
    found: Callable[[Verdict], None] = lambda verdict: None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, object]:
    """Play the seeds; the figures as ``--json`` writes them. ``found`` hears of each violation at once."""
    started = reported = time.monotonic()
    violations: list[dict[str, object]] = []
    rounds = 0
    for done, result in enumerate(verdicts(first, count, processes), 1):
        rounds += result.rounds
        if result.violations:
            violations.append(asdict(result))
            found(result)
        if time.monotonic() - reported > REPORT_SECONDS or done == count:
            reported = time.monotonic()
            progress(Progress(done, count, len(violations), done / max(reported - started, 1e-9)))
    seconds = max(time.monotonic() - started, 1e-9)
    return {
        "first": first,
        "seeds": count,
        "violations": violations,
        "rounds": rounds,
        "seconds": seconds,
        "seeds_per_second": count / seconds,
    }


def told(seed: int, tell: Callable[[str], None], plays: int) -> Verdict:
    """Play a seed and tell its story; if it fails, also that of the shortest schedule found within ``plays``."""
    script = scenario(seed)
    tell("\n".join(described(script)))
    result = story(script, tell)
    if result.violations and plays:
        tell(f"\nviolated: {'; '.join(result.violations)}\n\nThe shortest schedule that fails in the same way:")
        smallest = shrunk(script, plays)
        tell("\n".join(described(smallest)))
        story(smallest, tell)
        tell(f"\n{smallest!r}")
    return result


def described(script: Scenario) -> Iterator[str]:
    """A scenario, line by line."""
    settings = script.settings
    yield f"seed {script.seed}: {len(script.speeds)} nodes, H={settings.sync_every}, P={settings.fragments}, {settings}"
    yield f"{script.weather}"
    for node, (speed, joins, drift, line) in enumerate(
        zip(script.speeds, script.joins, script.drifts, script.lines, strict=True)
    ):
        yield f"  node-{node}: {speed} s per step, joins at {joins:.1f} s, clock at {drift:.3f}, line x{line:.0f}"
    for fault in script.faults:
        yield f"  {fault}"
