"""Means of runs and of curves."""

import pytest

from gradientmail_lightning.demo.results import Point, mean, mean_curve
from tests.lightning.demo.outcomes import RESULTS, outcome


def test_mean_of_a_figure() -> None:
    assert mean(RESULTS.alone, lambda run: run.loss) == pytest.approx(2.6)


def test_mean_curve_goes_as_far_as_the_shortest() -> None:
    short = outcome(0, 1.0)
    curve = mean_curve([short, outcome(1, 3.0)])
    assert curve[0] == Point(0, 0.0, pytest.approx(3.0))  # type: ignore[arg-type]  # pytest leaves it untyped
    assert len(curve) == len(short.curve)
