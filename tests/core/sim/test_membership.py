"""What random runs draw of how nodes take part."""

import random

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.sim.membership import drawn_roles, with_membership

PLAIN = DiLoCo()


def test_the_same_dice_draw_the_same_and_every_setting_comes_up() -> None:
    drawn = [with_membership(PLAIN, random.Random(seed)) for seed in range(200)]
    assert drawn == [with_membership(PLAIN, random.Random(seed)) for seed in range(200)]
    assert {settings.follow for settings in drawn} == {None, 1, 2}
    assert {settings.flush_on_close for settings in drawn} == {False, True}
    assert {settings.share for settings in drawn} == {"equal", "speed"}
    assert 50 < drawn.count(PLAIN) < 180


def test_roles_are_drawn_for_every_node_and_all_may_close() -> None:
    drawn = [drawn_roles(3, random.Random(seed)) for seed in range(100)]
    assert {role for roles in drawn for role in roles} == {"both", "either"} and {len(roles) for roles in drawn} == {3}
