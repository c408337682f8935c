"""DiLoCo's settings: defaults that work, refusals that explain, and what all nodes of a run must share."""

import dataclasses
import json
from typing import Any

import pytest

from gradientmail_core.algorithms.diloco import DiLoCo, settings_difference
from gradientmail_core.algorithms.merge import Rda, WeightedMean, merge_from
from gradientmail_core.algorithms.outer import SGD, Nesterov, outer_from
from gradientmail_core.algorithms.partition import ByBytes, Strided, partition_from
from gradientmail_core.errors import ConfigurationError

OWN: dict[str, Any] = {"in_flight": 1, "overlap_steps": 3, "follow": False}
SHARED: dict[str, Any] = {
    "sync_every": 50,
    "fragments": 2,
    "quorum_size": 2,
    "grace_seconds": 1.5,
    "outer": SGD(0.5),
    "merge": WeightedMean(),
    "partition": Strided(),
    "delta_codec": "F32",
    "tokens_per_step_max": 1000,
    "global_batch_size": 64,
}


def test_the_defaults_are_decoupled_diloco() -> None:
    settings = DiLoCo()
    assert (settings.outer, settings.merge, settings.partition) == (Nesterov(), Rda(), ByBytes())
    assert settings.overlap_steps is None and settings.in_flight == 2


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [
        ("sync_every", 0, "sync_every is 0"),
        ("sync_every", -5, "sync_every is -5"),
        ("fragments", 0, "fragments is 0"),
        ("fragments", 101, "fragments=101 is more than sync_every=100"),
        ("in_flight", 0, "in_flight is 0"),
        ("quorum_size", 0, "quorum_size is 0"),
        ("overlap_steps", -1, "overlap_steps is negative"),
        ("grace_seconds", -0.5, "grace_seconds is negative"),
        ("grace_seconds", float("nan"), "grace_seconds"),
        ("follow", True, "follow=True"),
        ("follow", 2, "follow=2"),
        ("tokens_per_step_max", 0, "tokens_per_step_max is below 1"),
        ("global_batch_size", 0, "global_batch_size is below 1"),
        ("delta_codec", "FP7", "FP7"),
    ],
)
def test_what_cannot_work_is_refused_with_its_remedy(setting: str, value: Any, word: str) -> None:
    with pytest.raises(ConfigurationError, match=word) as refusal:
        DiLoCo(**{setting: value})
    assert refusal.value.remedy


def test_no_run_has_more_fragments_than_keys_can_count() -> None:
    assert DiLoCo(sync_every=2000, fragments=999).fragments == 999
    with pytest.raises(ConfigurationError, match="at most 999"):
        DiLoCo(sync_every=2000, fragments=1000)


@pytest.mark.parametrize(
    "fields", [{}, {"sync_every": 1, "fragments": 1}, {"overlap_steps": 0}, {"grace_seconds": 0.0}, SHARED]
)
def test_settings_at_their_bounds_are_taken(fields: dict[str, Any]) -> None:
    DiLoCo(**fields)


def test_shared_settings_are_plain_json_that_comes_back() -> None:
    shared = DiLoCo(**SHARED).shared_settings()
    assert json.loads(json.dumps(shared, allow_nan=False)) == shared
    assert outer_from(shared["outer"]) == SGD(0.5)  # type: ignore[arg-type]
    assert merge_from(shared["merge"]) == WeightedMean()  # type: ignore[arg-type]
    assert partition_from(shared["partition"]) == Strided()  # type: ignore[arg-type]


def test_every_setting_is_either_shared_or_a_nodes_own() -> None:
    fields = {field.name for field in dataclasses.fields(DiLoCo)}
    assert set(DiLoCo().shared_settings()) - {"name"} == fields - set(OWN)


def test_a_nodes_own_settings_make_no_difference() -> None:
    assert settings_difference(DiLoCo().shared_settings(), DiLoCo(**OWN).shared_settings()) == []


@pytest.mark.parametrize("setting", SHARED)
def test_each_shared_setting_makes_one(setting: str) -> None:
    difference = settings_difference(DiLoCo(**{setting: SHARED[setting]}).shared_settings(), DiLoCo().shared_settings())
    assert len(difference) == 1 and difference[0].startswith(f"{setting}: ")
    assert difference[0].endswith("in the run")


def test_codecs_are_compared_by_their_canonical_name() -> None:
    assert settings_difference(
        DiLoCo(delta_codec="bf16").shared_settings(), DiLoCo(delta_codec="BF16").shared_settings()
    ) == []  # fmt: skip


def test_a_setting_that_only_one_side_knows_is_shown() -> None:
    assert settings_difference({"a": 1, "b": None}, {"a": 1}) == ["b: None here, nothing in the run"]
    assert settings_difference({"a": 1}, {"a": 1, "c": "new"}) == ["c: nothing here, 'new' in the run"]
