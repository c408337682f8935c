"""The study of carrying over a commit: its table by hand, and a short run of each side."""

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.quality.carry import ALONE, CARRY, OVERWRITE, SETTINGS, CarryTrial, run, table, trials
from gradientmail_core.algorithms.diloco import DiLoCo


def row(variant: str, seed: int, loss: float, dropped: float = 0.0) -> Mapping[str, Any]:
    trial = {"variant": variant, "seed": seed, "speeds": [1.0, 1.0], "sync_every": 20}
    return {"trial": trial, "loss": loss, "dropped": dropped}


def test_sides_are_compared_seed_by_seed_where_both_have_one() -> None:
    rows = [row(ALONE, seed, 3.0) for seed in range(3)]
    rows += [row(OVERWRITE, seed, 2.5 + seed / 10, 0.5) for seed in range(3)]
    rows += [row(CARRY, seed, 2.4 + seed / 10, 0.1) for seed in range(2)]
    assert table(rows).splitlines()[2] == "| 20 | 1, 1 | 3.000 | 2.550 | 2.450 | -0.100 ± 0.000 | 50% | 10% | 2 |"


def test_its_sides_are_the_default_and_the_former_one() -> None:
    assert SETTINGS[CARRY] == DiLoCo(fragments=4, compression=None)
    assert SETTINGS[OVERWRITE] == DiLoCo.decoupled(fragments=4, compression=None)


@pytest.mark.parametrize("variant", [OVERWRITE, CARRY])
def test_a_run_merges_what_real_models_trained(variant: str) -> None:
    settings = next(trial for trial in trials() if trial.variant == variant).algorithm
    assert settings is not None
    short = CarryTrial(
        variant=variant, speeds=(1.0, 0.5), sync_every=8, seed=0, algorithm={**settings, "sync_every": 8},
        steps=24, bytes_per_second=1e6,
    )  # fmt: skip
    found = run(short)
    assert 0 < float(str(found["merged"])) <= 1 and float(str(found["loss"])) < 5.6
