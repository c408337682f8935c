"""Compute utilization: against what can be worked out by hand, and against the paper's table 4."""

import numpy as np
import pytest

from benchmarks.tables.table4 import computed
from gradientmail_core.sim.utilization import Layered, Merging, bandwidth_for, utilization


def test_an_endless_line_costs_nothing_and_more_bandwidth_never_hurts() -> None:
    model = Layered(layers=24, step_seconds=0.1, bits=16e9)
    grid = np.logspace(7, 15, 30)
    for merging in (Merging(), Merging(100), Merging(100, 8), Merging(100, 8, overlap=1)):
        reached = utilization(model, merging, grid)
        assert (np.diff(reached) >= -1e-12).all() and reached[-1] == pytest.approx(1.0, abs=1e-3)


def test_a_barrier_over_one_layer_waits_for_the_whole_transfer() -> None:
    model = Layered(layers=1, step_seconds=3.0, bits=10.0)
    (reached,) = utilization(model, Merging(), np.array([5.0]))
    assert reached == pytest.approx(2.0 / (2.0 + 2.0))


def test_overlap_hides_a_transfer_that_is_shorter_than_it() -> None:
    model = Layered(layers=1, step_seconds=3.0, bits=10.0)
    (hidden,) = utilization(model, Merging(every=10, overlap=2), np.array([4.0]))
    (barrier,) = utilization(model, Merging(every=10), np.array([4.0]))
    assert barrier == pytest.approx(20.0 / (20.0 + 2.5), abs=0.02) and hidden > barrier


def test_a_target_that_the_grid_does_not_reach_has_no_bandwidth() -> None:
    model = Layered(layers=4, step_seconds=0.1, bits=1e9)
    grid = np.array([1e6, 1e9, 1e14])
    assert bandwidth_for(model, Merging(), (0.99,), grid[:1]) == (None,)
    assert bandwidth_for(model, Merging(), (0.5, 0.99), grid) == (1e14, 1e14)


def test_table_four_of_streaming_diloco() -> None:
    figures = computed()
    assert figures["cells"] == 75
    assert figures["equal"] >= 63
    assert figures["farthest"] <= 1
