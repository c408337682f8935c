"""Shrinking leaves what a failure needs, and nothing else."""

from dataclasses import replace

from gradientmail_core.sim.scenario import Freeze, Kill, Scenario, scenario
from gradientmail_core.sim.shrinking import shrunk, simpler
from gradientmail_core.sim.store import Weather
from gradientmail_core.sim.swarm import Verdict


def verdict(script: Scenario, fails: bool) -> Verdict:
    return Verdict(script.seed, (f"node-{len(script.faults)} failed",) if fails else (), 0, 0.0)


def test_what_a_failure_needs_is_left() -> None:
    script = replace(
        scenario(3),
        speeds=(0.5, 0.5, 0.5),
        joins=(0.0, 1.0, 2.0),
        drifts=(0.9, 1.0, 1.1),
        lines=(1.0, 1.0, 5.0),
        weather=Weather(latency=0.2, request_lost=0.1, listing_lags=0.3),
        faults=(*(Kill(float(at), at % 3, None) for at in range(9)), Freeze(9.0, 1, 4.0)),
    )

    def judge(candidate: Scenario) -> Verdict:
        frozen = any(isinstance(fault, Freeze) for fault in candidate.faults)
        return verdict(candidate, frozen and candidate.weather.request_lost > 0)

    smallest = shrunk(script, judge=judge)
    assert smallest.faults == (Freeze(9.0, 1, 4.0),)
    assert smallest.weather == Weather(request_lost=0.1)
    assert len(smallest.speeds) == 2 and smallest.joins == (0.0, 0.0) and smallest.drifts == (1.0, 1.0)


def test_what_does_not_fail_stays_as_it_is_and_plays_are_bounded() -> None:
    script = scenario(3)
    assert shrunk(script, judge=lambda candidate: verdict(candidate, False)) == script
    played = []

    def judge(candidate: Scenario) -> Verdict:
        played.append(candidate)
        return verdict(candidate, True)

    shrunk(script, plays=5, judge=judge)
    assert len(played) == 6


def test_another_failure_is_not_taken_for_this_one() -> None:
    script = replace(scenario(3), faults=(Kill(1.0, 0, None), Kill(2.0, 0, None)))

    def judge(candidate: Scenario) -> Verdict:
        what = "round 4 does not follow" if len(candidate.faults) == 2 else "a node did not leave"
        return Verdict(candidate.seed, (what,), 0, 0.0)

    assert len(shrunk(script, judge=judge).faults) == 2


def test_simpler_scenarios_keep_their_nodes_together() -> None:
    for script in map(scenario, range(20)):
        for candidate in simpler(script):
            nodes = len(candidate.speeds)
            assert nodes == len(candidate.joins) == len(candidate.drifts) == len(candidate.lines)
            assert all(getattr(fault, "node", 0) < nodes for fault in candidate.faults)
