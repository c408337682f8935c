"""A draw of how nodes take part, for random runs: when they publish, how they leave, what they take upon themselves."""

import random
from dataclasses import replace

from gradientmail_core.algorithms.diloco import DiLoCo


def with_membership(settings: DiLoCo, dice: random.Random) -> DiLoCo:
    """``settings`` with what a node decides about its part drawn anew; as they are in half of the draws."""
    if dice.random() < 1 / 2:
        return settings
    return replace(settings, follow=dice.choice((settings.follow, 1, 2)), flush_on_close=dice.choice((False, True)))
