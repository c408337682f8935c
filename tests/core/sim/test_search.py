"""Searching: every seed is played, whatever fails is told at once and again in the figures."""

import pytest

from gradientmail_core.sim import search as module
from gradientmail_core.sim.scenario import Scenario, scenario
from gradientmail_core.sim.search import Progress, described, search, told, verdicts
from gradientmail_core.sim.swarm import Verdict


def test_processes_play_what_one_would() -> None:
    assert list(verdicts(1001, 2, 2)) == list(verdicts(1001, 2, 1))


def test_a_seed_that_ends_otherwise_when_it_is_played_again_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []

    def differs(script: Scenario) -> Verdict:
        played.append(script.seed)
        return Verdict(script.seed, (), 5, 1.0, tape=str(len(played)))

    monkeypatch.setattr(module, "play", differs)
    first, last = list(verdicts(14, 2, 1))
    assert played == [14, 15, 15]
    assert first.violations == () and last.violations == ("played again it ends otherwise",)


def test_violations_are_told_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(script: Scenario) -> Verdict:
        return Verdict(script.seed, ("a node failed",) if script.seed % 2 else (), 5, 1.0)

    monkeypatch.setattr(module, "play", fails)
    heard: list[Verdict] = []
    states: list[Progress] = []
    figures = search(10, 4, 1, found=heard.append, progress=states.append)
    assert [verdict.seed for verdict in heard] == [11, 13]
    assert (figures["seeds"], figures["rounds"], len(figures["violations"])) == (4, 20, 2)  # type: ignore[arg-type]  # a list, as JSON
    assert states[-1].done == 4 and states[-1].violated == 2


def test_a_story_begins_with_what_was_drawn() -> None:
    lines: list[str] = []
    verdict = told(1001, lines.append, plays=5)
    assert verdict.violations == ()
    assert lines[0].startswith("seed 1001: ") and "\n".join(described(scenario(1001))) == lines[0]
    assert sum("closed round" in line for line in lines) > 0
