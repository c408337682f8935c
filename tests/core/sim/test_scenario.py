"""Scenarios: drawn from a seed alone, and of every kind."""

from typing import get_args

from gradientmail_core.sim.scenario import Fault, scenario


def test_a_seed_fixes_the_scenario() -> None:
    assert scenario(7) == scenario(7)
    assert scenario(7) != scenario(8)


def test_the_swarm_has_every_kind_of_fault_and_setting() -> None:
    drawn = [scenario(seed) for seed in range(200)]
    faults = [fault for script in drawn for fault in script.faults]
    assert {type(fault) for fault in faults} == set(get_args(Fault))
    assert {script.settings.overlap_steps for script in drawn} >= {None, 0}
    assert {len(script.speeds) for script in drawn} == {1, 2, 3, 4, 5}
    for chance in ("request_lost", "write_late", "undecided", "throttled", "silent", "unfound", "listing_lags"):
        assert any(getattr(script.weather, chance) > 0 for script in drawn), chance
    assert any(max(script.lines) > 1 for script in drawn) and any(script.lingers for script in drawn)


def test_faults_come_in_the_order_of_their_times_and_to_nodes_that_are_there() -> None:
    for script in map(scenario, range(100)):
        assert list(script.faults) == sorted(script.faults, key=lambda fault: fault.at)
        assert all(getattr(fault, "node", 0) < len(script.speeds) for fault in script.faults)
        assert len(script.speeds) == len(script.joins) == len(script.drifts) == len(script.lines)
