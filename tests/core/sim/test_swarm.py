"""Scenarios: drawn from a seed alone, and of every kind."""

from dataclasses import replace

from gradientmail_core.sim.store import Weather
from gradientmail_core.sim.swarm import Fault, Freeze, Hang, Junk, Kill, Outage, Partition, play, scenario, story

KINDS: tuple[type[Fault], ...] = (Kill, Freeze, Partition, Outage, Hang, Junk)


def test_a_seed_fixes_the_scenario() -> None:
    assert scenario(7) == scenario(7)
    assert scenario(7) != scenario(8)


def test_the_swarm_has_every_kind_of_fault_and_setting() -> None:
    drawn = [scenario(seed) for seed in range(200)]
    faults = [fault for script in drawn for fault in script.faults]
    assert {type(fault) for fault in faults} == set(KINDS)
    assert {script.settings.overlap_steps for script in drawn} >= {None, 0}
    assert {len(script.speeds) for script in drawn} == {1, 2, 3, 4, 5}
    assert any(script.weather.write_late > 0 for script in drawn)


def test_equal_scenarios_end_alike() -> None:
    script = replace(scenario(3), weather=Weather(), faults=())
    assert play(script) == play(script)


def test_a_story_tells_every_event() -> None:
    lines: list[str] = []
    verdict = story(replace(scenario(3), weather=Weather(), faults=()), lines.append)
    assert verdict.violations == ()
    assert sum("closed round" in line for line in lines) == verdict.rounds
