"""DiLoCo's settings: defaults that work, refusals that explain, and what all nodes of a run must share."""

import dataclasses
import json
from typing import Any

import pytest

from gradientmail_core.algorithms.alignment import Blend, Carry, Eager, Overwrite
from gradientmail_core.algorithms.diloco import OWN, DiLoCo, diloco_from, settings_difference
from gradientmail_core.algorithms.merge import Rda, WeightedMean, merge_from
from gradientmail_core.algorithms.outer import SGD, Nesterov, outer_from
from gradientmail_core.algorithms.partition import ByBytes, Strided, partition_from
from gradientmail_core.errors import ConfigurationError

OWNED: dict[str, Any] = {
    "in_flight": 1,
    "overlap_steps": 3,
    "follow": False,
    "alignment": Overwrite(),
    "stale": "reject",
    "error_feedback": True,
    "compression": None,
    "merge_memory": 0,
    "flush_on_close": True,
}
SHARED: dict[str, Any] = {
    "sync_every": 50,
    "fragments": 2,
    "quorum_size": 2,
    "grace_seconds": 1.5,
    "outer": SGD(0.5),
    "merge": WeightedMean(),
    "partition": Strided(),
    "delta_codec": "F32",
    "commit_codec": "INT8",
    "full_every": 4,
    "master_dtype": "BF16",
    "momentum_dtype": "F16",
    "residual_dtype": "BF16",
    "tokens_per_step_max": 1000,
    "global_batch_size": 64,
    "share": "speed",
    "joiner_ramp": 2,
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
        ("follow", 0, "follow=0"),
        ("follow", "2", "follow='2'"),
        ("tokens_per_step_max", 0, "tokens_per_step_max is below 1"),
        ("global_batch_size", 0, "global_batch_size is below 1"),
        ("share", "fair", "share='fair'"),
        ("joiner_ramp", -1, "joiner_ramp=-1"),
        ("delta_codec", "FP7", "FP7"),
        ("commit_codec", "FP7", "FP7"),
        ("full_every", 0, "full_every"),
        ("full_every", 4, "full_every=4 leaves nothing to publish"),
        ("master_dtype", "INT8", "master_dtype='INT8'"),
        ("momentum_dtype", "F8_E4M3", "momentum_dtype='F8_E4M3'"),
        ("residual_dtype", "F16", "residual_dtype='F16'"),
        ("error_feedback", 1.5, "error_feedback=1.5"),
        ("error_feedback", 0.0, "error_feedback=0.0"),
        ("stale", "keep", "stale='keep'"),
        ("alignment", "carry", "alignment='carry'"),
        ("compression", "lz4", "compression='lz4'"),
        ("merge_memory", -1, "merge_memory is negative"),
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
    assert outer_from(shared["outer"]) == SGD(0.5)  # type: ignore[arg-type]  # settings, as JSON
    assert merge_from(shared["merge"]) == WeightedMean()  # type: ignore[arg-type]  # settings, as JSON
    assert partition_from(shared["partition"]) == Strided()  # type: ignore[arg-type]  # settings, as JSON


def test_every_setting_is_either_shared_or_a_nodes_own() -> None:
    fields = {field.name for field in dataclasses.fields(DiLoCo)}
    assert set(DiLoCo().shared_settings()) - {"name"} == fields - set(OWNED)
    assert set(OWNED) == OWN


def test_a_nodes_own_settings_make_no_difference() -> None:
    assert settings_difference(DiLoCo().shared_settings(), DiLoCo(**OWNED).shared_settings()) == []


@pytest.mark.parametrize("setting", SHARED)
def test_each_shared_setting_makes_one(setting: str) -> None:
    changed = {setting: SHARED[setting]}
    plain = DiLoCo(commit_codec="F32" if setting == "full_every" else None)
    difference = settings_difference(dataclasses.replace(plain, **changed).shared_settings(), plain.shared_settings())
    assert len(difference) == 1 and difference[0].startswith(f"{setting}: ")
    assert difference[0].endswith("in the run")


def test_codecs_are_compared_by_their_canonical_name() -> None:
    assert settings_difference(
        DiLoCo(delta_codec="bf16").shared_settings(), DiLoCo(delta_codec="BF16").shared_settings()
    ) == []  # fmt: skip


def test_a_setting_that_only_one_side_knows_is_shown() -> None:
    assert settings_difference({"a": 1, "b": None}, {"a": 1}) == ["b: None here, nothing in the run"]
    assert settings_difference({"a": 1}, {"a": 1, "c": "new"}) == ["c: nothing here, 'new' in the run"]


def test_a_run_that_began_with_another_default_keeps_it_and_tells_who_joins_with_the_new_one() -> None:
    began = DiLoCo(outer=Nesterov(warmup=10.0))
    kept = json.loads(json.dumps(began.shared_settings()))
    assert diloco_from(kept) == began
    assert settings_difference(DiLoCo(outer=Nesterov(warmup=10.0)).shared_settings(), kept) == []
    (line,) = settings_difference(DiLoCo().shared_settings(), kept)
    assert "'warmup': 3.0" in line.split(" here, ")[0] and "'warmup': 10.0" in line.split(" here, ")[1]


def test_a_manifests_settings_come_back_as_they_were() -> None:
    settings = DiLoCo(**SHARED)
    assert diloco_from(json.loads(json.dumps(settings.shared_settings()))) == settings
    assert diloco_from(DiLoCo(**OWNED).shared_settings()) == DiLoCo()


@pytest.mark.parametrize(
    "changes",
    [{"name": "gossip"}, {"more": 1}, {"outer": {"name": "Lion"}}, {"outer": 3}, {"sync_every": "x"}, {"fragments": 0}],
)
def test_a_manifest_with_other_settings_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        diloco_from(DiLoCo().shared_settings() | changes)


def test_the_fields_own_names_are_taken() -> None:
    settings = DiLoCo(delta_dtype="F4", commit_dtype="BF16", mixing=0.25, outer_lr=0.4, outer_momentum=0.8)
    assert (settings.delta_codec, settings.commit_codec, settings.alignment) == ("F4", "BF16", Blend(0.25))
    assert settings.outer == Nesterov(lr=0.4, momentum=0.8)
    assert DiLoCo(mixing=0.0).alignment == Overwrite()
    assert dataclasses.replace(settings, fragments=2) == DiLoCo(
        fragments=2, delta_codec="F4", commit_codec="BF16", alignment=Blend(0.25), outer=Nesterov(0.4, 0.8)
    )


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"delta_codec": "F4", "delta_dtype": "F8_E4M3"}, "delta_dtype"),
        ({"alignment": Overwrite(), "mixing": 0.5}, "mixing"),
        ({"outer": SGD(), "outer_momentum": 0.5}, "SGD has no momentum"),
        ({"error_feedback": True, "residual_dtype": None}, "residual_dtype"),
    ],
)
def test_two_names_that_disagree_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        DiLoCo(**fields)


@pytest.mark.parametrize("preset", ["standard", "streaming", "decoupled", "eager", "sparse", "local_sgd", "solo"])
def test_presets_can_be_overridden_by_either_name(preset: str) -> None:
    made: DiLoCo = getattr(DiLoCo, preset)(sync_every=48, delta_dtype="INT8", mixing=0.3)
    assert (made.sync_every, made.delta_codec, made.alignment) == (48, "INT8", Blend(0.3))
    plain: DiLoCo = getattr(DiLoCo, preset)()
    assert diloco_from(plain.shared_settings()).shared_settings() == plain.shared_settings()


def test_presets_have_their_papers_values() -> None:
    assert DiLoCo.decoupled() == DiLoCo(alignment=Overwrite(), stale="reject")
    assert (DiLoCo().alignment, DiLoCo().stale) == (Carry(), "rebase"), "nothing that was trained is dropped"
    assert (DiLoCo.standard().sync_every, DiLoCo.standard().overlap_steps) == (500, 0)
    assert DiLoCo.streaming().alignment == Blend(0.5) and DiLoCo.streaming().outer == Nesterov(lr=0.4)
    assert DiLoCo.eager().alignment == Eager()
    assert (DiLoCo.sparse().delta_codec, DiLoCo.sparse().feedback_decay) == ("TOPK(64/4096,INT2)", 0.95)
    assert DiLoCo.local_sgd().outer == SGD(1.0) and DiLoCo.solo().quorum_size == 1
