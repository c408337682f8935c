"""Fleets: goodput under failures and a storm in short, beside the bounds the committed logs hold in full."""

import json
from collections.abc import Coroutine
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.protocol.records import _parsed_round
from gradientmail_core.sim.fleet import (
    Fleet,
    Outcome,
    Voyage,
    failures,
    goodput_fleet,
    lock_step_goodput,
    run,
    storm,
    storm_fleet,
)
from gradientmail_core.sim.loop import VirtualLoop, run_virtually
from gradientmail_core.sim.scenario import Kill
from gradientmail_core.sim.store import Weather
from tests.core.engine.parts import SETTINGS


def test_eight_failing_nodes_train_nearly_all_the_time_that_they_are_up() -> None:
    outcome = run(goodput_fleet(minutes=4, seed=1))
    assert outcome.failed == 0 and outcome.rounds >= 0.95 * outcome.due_rounds
    assert 0.84 < outcome.goodput < 0.90
    assert 0.4 < outcome.merged_share < 1.0


def test_a_lock_step_run_stops_with_any_of_its_nodes() -> None:
    assert lock_step_goodput(8, 24 * 3600.0, 60.0, 8.0, seed=0) == pytest.approx(60 / (60 + 8 * 8), abs=0.01)
    assert lock_step_goodput(1, 24 * 3600.0, 60.0, 8.0, seed=0) == pytest.approx(60 / 68, abs=0.01)


def figures(name: str) -> dict[str, float]:
    """The means in a committed log."""
    log = Path(__file__).parents[3] / "docs" / "results" / f"{name}.json"
    found = json.loads(log.read_text(encoding="utf-8"))
    assert found["minutes"] == 30.0 and found["seeds"] == len(found["runs"]) == 20
    return {key: value for key, value in found.items() if isinstance(value, float | int)}


def test_the_committed_storm_holds_what_is_promised() -> None:
    found = figures("storm")
    assert found["committed_share"] >= 0.99 and found["participants"] >= 30 and found["failed"] == 0


def test_the_committed_goodput_is_within_a_point_of_the_bound() -> None:
    found = figures("goodput")
    assert 0.87 <= found["goodput"] <= 0.89 and found["failed"] == 0
    assert found["lock_step"] == pytest.approx(0.48, abs=0.02)


def test_a_storm_stops_no_round_and_leaves_out_few() -> None:
    outcomes = [run(storm_fleet(minutes=4, seed=seed, nodes=12, per_hour=47.0)) for seed in range(4)]
    assert not any(outcome.failed for outcome in outcomes)
    assert all(outcome.rounds >= 0.95 * outcome.due_rounds for outcome in outcomes)
    assert fmean(outcome.participants for outcome in outcomes) >= 11


def test_failures_come_at_the_rate_asked_for_and_never_while_a_node_is_down() -> None:
    faults = failures(8, 36_000.0, 60.0, 8.0, seed=3)
    assert len(faults) == pytest.approx(8 * 36_000 / 68, rel=0.05)
    for node in range(8):
        times = [fault.at for fault in faults if isinstance(fault, Kill) and fault.node == node]
        assert all(later - earlier > 8.0 for earlier, later in pairwise(times))
    assert len(storm(32, 360_000.0, 125.0, seed=0)) == pytest.approx(12_500, rel=0.05)


def waits_of(fleet: Fleet) -> tuple[int, Outcome]:
    """How often anything in a fleet waits for a time or an answer, and what comes of it."""
    loops: list[VirtualLoop] = []

    def begun(loop: VirtualLoop) -> Coroutine[Any, Any, Outcome]:
        loops.append(loop)
        return Voyage(loop, fleet).whole()

    outcome = run_virtually(begun)
    return loops[0]._timers_made, outcome


def test_a_node_among_many_costs_no_more_than_one_among_few() -> None:
    """Neither requests nor work of a node grow with the number of nodes, and one record is parsed once for all.

    Above 64 participants a round has a roll, which costs each node one request more.
    """
    settings = DiLoCo(sync_every=10, fragments=2)
    few, many = (Fleet(nodes=nodes, settings=settings, seconds=30.0, jitter=0.05, lease=12.0) for nodes in (18, 72))
    few_waits, of_few = waits_of(few)
    _parsed_round.cache_clear()
    many_waits, of_many = waits_of(many)
    assert of_many.rounds == of_few.rounds and of_many.participants > 54
    assert many_waits / 72 < 1.25 * few_waits / 18
    for kind in ("puts", "lists", "deletes"):
        assert getattr(of_many.traffic, kind) / 72 < 1.25 * getattr(of_few.traffic, kind) / 18, kind
    assert of_many.traffic.gets / 72 - of_many.rounds < 1.25 * of_few.traffic.gets / 18
    assert _parsed_round.cache_info().misses < 2 * of_many.rounds


def test_payloads_weigh_what_they_stand_for() -> None:
    light = Fleet(nodes=2, settings=SETTINGS, seconds=60.0, step_seconds=0.5, lease=12.0)
    heavy = replace(light, delta_bytes=1_000_000, commit_bytes=2_000_000, weather=Weather(latency=0.03, bandwidth=1e6))
    assert run(light).traffic.bytes_up < 1e6
    outcome = run(heavy)
    assert outcome.rounds >= 4
    assert outcome.traffic.bytes_up >= outcome.rounds * (2 * 1_000_000 + 2 * 2_000_000) * 0.9


def test_who_stops_for_commits_stalls_on_a_slow_line() -> None:
    barrier = replace(SETTINGS, overlap_steps=0, fragments=1, follow=False, quorum_size=2, in_flight=1)
    slow = Weather(latency=0.03, bandwidth=1e6)
    fleet = Fleet(2, barrier, 120.0, step_seconds=0.5, lease=60.0, delta_bytes=2_000_000, weather=slow)
    stopped, overlapped = run(fleet), run(replace(fleet, settings=replace(barrier, overlap_steps=None)))
    assert stopped.utilization < 0.9 < overlapped.utilization
    assert stopped.stalled_seconds > 10.0


def test_equal_fleets_end_alike() -> None:
    fleet = goodput_fleet(minutes=0.5, seed=5)
    assert run(fleet) == run(fleet)
