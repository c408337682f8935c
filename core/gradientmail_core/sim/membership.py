"""A draw of how nodes take part, for random runs: when they publish, how they leave, what they take upon themselves."""

import random
from dataclasses import replace

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.roles import Role


def with_membership(settings: DiLoCo, dice: random.Random) -> DiLoCo:
    """``settings`` with what a node decides about its part drawn anew; as they are in half of the draws."""
    if dice.random() < 1 / 2:
        return settings
    return replace(
        settings,
        follow=dice.choice((settings.follow, 1, 2)),
        flush_on_close=dice.choice((False, True)),
        joiner_ramp=dice.choice((0, 2)),
        global_batch_size=64,
        share=dice.choice(("equal", "speed")),
    )


def drawn_roles(nodes: int, dice: random.Random) -> tuple[Role, ...]:
    """A role for each node, all of them such as may close rounds; only the usual one in half of the draws."""
    kinds: tuple[Role, ...] = ("both", "either")
    if dice.random() < 1 / 2:
        return kinds[:1] * nodes
    return tuple(dice.choice(kinds) for _ in range(nodes))
