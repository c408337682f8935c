"""Playing a scenario: deterministic, and told in full to who asks."""

from dataclasses import replace

from gradientmail_core.sim.scenario import scenario
from gradientmail_core.sim.store import Weather
from gradientmail_core.sim.swarm import play, story


def test_equal_scenarios_end_alike() -> None:
    script = replace(scenario(3), weather=Weather(), faults=())
    assert play(script) == play(script)


def test_a_story_tells_every_event() -> None:
    lines: list[str] = []
    verdict = story(replace(scenario(3), weather=Weather(), faults=()), lines.append)
    assert verdict.violations == ()
    assert sum("closed round" in line for line in lines) == verdict.rounds
