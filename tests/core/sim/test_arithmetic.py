"""Random settings: the same for a seed, all kinds over many, and always ones that a run can have."""

import random

from gradientmail_core.algorithms.diloco import DiLoCo, diloco_from
from gradientmail_core.sim.arithmetic import CODECS, with_arithmetic

DRAWN = [with_arithmetic(DiLoCo(), random.Random(seed)) for seed in range(300)]


def test_a_seed_draws_the_same_settings() -> None:
    assert DRAWN[:20] == [with_arithmetic(DiLoCo(), random.Random(seed)) for seed in range(20)]


def test_every_kind_is_drawn_and_a_third_stays_plain() -> None:
    assert {settings.delta_codec for settings in DRAWN} == {*CODECS, DiLoCo().delta_codec}
    assert {settings.full_every for settings in DRAWN} == {1, 2, 5}
    assert len({type(settings.alignment) for settings in DRAWN}) == 5
    assert 60 < DRAWN.count(DiLoCo()) < 140


def test_a_manifest_can_hold_them() -> None:
    for settings in DRAWN:
        assert diloco_from(settings.shared_settings()).shared_settings() == settings.shared_settings()
