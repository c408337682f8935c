"""Algorithms survive the way through JSON, and settings from a stranger fail with one kind of error."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from gradientmail_core.algorithms.alignment import Adaptive, Blend, Carry, Eager, Overwrite, alignment_from
from gradientmail_core.algorithms.merge import Median, Rda, TrimmedMean, WeightedMean, merge_from
from gradientmail_core.algorithms.outer import SGD, Adam, HeavyBall, Nesterov, outer_from
from gradientmail_core.algorithms.partition import ByBytes, Strided, partition_from
from gradientmail_core.errors import ConfigurationError

EVERY: list[tuple[Any, Callable[[Mapping[str, object]], Any]]] = [
    *((merge, merge_from) for merge in (WeightedMean(clip=3.0), Median(), TrimmedMean(0.1), Rda())),
    (Rda(("embedding",), cancel="zero", floor=0.5, clip=2), merge_from),
    *((outer, outer_from) for outer in (Nesterov(0.4, 0.5, 3.0, 0.3), HeavyBall(), SGD(0.5), Adam(beta2=0.95))),
    *((partition, partition_from) for partition in (ByBytes(), Strided())),
    *((rule, alignment_from) for rule in (Overwrite(), Blend(0.25), Carry(), Adaptive(0.7, 0.2, 3), Eager())),
]


@pytest.mark.parametrize(("algorithm", "read"), EVERY, ids=lambda value: getattr(value, "__name__", repr(value)[:40]))
def test_settings_round_trip_through_json(algorithm: Any, read: Callable[[Mapping[str, object]], Any]) -> None:
    assert read(json.loads(json.dumps(algorithm.settings()))) == algorithm


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"name": None},
        {"name": ["Nesterov"]},
        {"name": "Krum"},
        {"name": "Nesterov", "speed": 1.0},
        {"name": "Nesterov", "lr": "0.7"},
        {"name": "Nesterov", "lr": float("nan")},
        {"name": "Nesterov", "lr": -1.0},
        {"name": "Nesterov", "lr": True},
        {"name": "Nesterov", "lr": 10**400},
        {"name": "Nesterov", "momentum": 1.0},
        {"name": "Nesterov", "warmup": None},
        {"name": "Adam", "eps": 0.0},
    ],
    ids=str,
)
def test_strange_outer_settings_are_a_configuration_error(settings: Mapping[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        outer_from(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "Rda", "cancel": "random"},
        {"name": "Rda", "direct_roles": ["matrix", "secret"]},
        {"name": "Rda", "direct_roles": 7},
        {"name": "Rda", "floor": -1e-6},
        {"name": "TrimmedMean", "share": 0.5},
        {"name": "WeightedMean", "clip": 0.5},
        {"name": "Median", "clip": [1]},
    ],
    ids=str,
)
def test_strange_merge_settings_are_a_configuration_error(settings: Mapping[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        merge_from(settings)


@pytest.mark.parametrize(
    "settings",
    [{"name": "Blend", "mixing": 1.5}, {"name": "Adaptive", "high": 0.1}, {"name": "Adaptive", "hysteresis": 0}],
)
def test_strange_alignment_settings_are_a_configuration_error(settings: Mapping[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        alignment_from(settings)


def test_the_error_names_what_is_known() -> None:
    with pytest.raises(ConfigurationError, match=r"ByBytes, Strided"):
        partition_from({"name": "Random"})
