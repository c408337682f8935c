"""Shrinking: of a scenario that fails, leave out what it does not need to fail in the same way.

Parts are left out greedily, large ones first: halves of the faults, then single ones, nodes from the last, each kind
of bad weather, each oddity of a node. What remains is the shortest schedule this finds, not the shortest there is. A
failure is the same if its first violation is, numbers aside; every candidate is played in full, so what comes out
fails by itself.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from gradientmail_core.sim.scenario import Scenario
from gradientmail_core.sim.store import Weather
from gradientmail_core.sim.swarm import Verdict, play

PLAYS_MOST = 400


def shrunk(script: Scenario, plays: int = PLAYS_MOST, judge: Callable[[Scenario], Verdict] = play) -> Scenario:
    """The smallest scenario found within ``plays`` that fails as ``script`` does; ``script`` itself if it does not."""
    symptom = _symptom(judge(script))
    if not symptom:
        return script
    seen: set[Scenario] = {script}
    progress = True
    while progress:
        progress = False
        for candidate in simpler(script):
            if candidate in seen or plays == 0:
                continue
            seen.add(candidate)
            plays -= 1
            if _symptom(judge(candidate)) == symptom:
                script, progress = candidate, True
                break
    return script


def simpler(script: Scenario) -> Iterator[Scenario]:
    """Scenarios with a part of ``script`` left out, the largest parts first."""
    yield from _fewer_faults(script)
    if len(script.speeds) > 1:
        yield _without_the_last_node(script)
    for field in fields(Weather):
        weather = replace(script.weather, **{field.name: getattr(Weather(), field.name)})
        yield replace(script, weather=weather)
    nodes = len(script.speeds)
    yield replace(script, lingers=False)
    yield replace(script, joins=(0.0,) * nodes)
    yield replace(script, drifts=(1.0,) * nodes)
    yield replace(script, lines=(1.0,) * nodes)
    yield replace(script, speeds=(0.2,) * nodes)
    yield replace(script, roles=())


def _fewer_faults(script: Scenario) -> Iterator[Scenario]:
    faults, size = script.faults, (len(script.faults) + 1) // 2
    while size:
        for start in range(0, len(faults), size):
            yield replace(script, faults=faults[:start] + faults[start + size :])
        size //= 2


def _without_the_last_node(script: Scenario) -> Scenario:
    nodes = len(script.speeds) - 1
    return replace(
        script,
        speeds=script.speeds[:nodes],
        joins=script.joins[:nodes],
        drifts=script.drifts[:nodes],
        lines=script.lines[:nodes],
        roles=script.roles[:nodes],
        faults=tuple(fault for fault in script.faults if getattr(fault, "node", 0) < nodes),
    )


def _symptom(verdict: Verdict) -> str:
    return re.sub(r"[0-9]+|[0-9a-f]{8,}", "#", verdict.violations[0]) if verdict.violations else ""
