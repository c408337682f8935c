"""Whole runs on virtual time under every setting of the arithmetic: all nodes end on the committed bytes."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.algorithms.alignment import Adaptive, Blend, Carry, Eager
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.outer import SGD, Adam, HeavyBall
from gradientmail_core.sim.checks import committed_parameters, forks, tape
from gradientmail_core.sim.world import SimulatedNode, ended
from tests.scenarios.test_simulated_runs import World, virtually

BASE = DiLoCo(sync_every=20, fragments=2, grace_seconds=0.5)

SETTINGS: dict[str, dict[str, Any]] = {
    "blend": {"alignment": Blend(0.5)},
    "carry": {"alignment": Carry(), "stale": "rebase"},
    "adaptive": {"alignment": Adaptive(high=0.1, low=0.0)},
    "eager": {"alignment": Eager()},
    "eager rebase": {"alignment": Eager(), "stale": "rebase", "outer": Adam(), "delta_codec": "INT8"},
    "rebase": {"stale": "rebase"},
    "int2 with feedback": {"delta_codec": "INT2", "error_feedback": True, "residual_dtype": "BF16"},
    "sparse": {"delta_codec": "TOPK(64/4096,INT2)", "error_feedback": 0.95, "outer": SGD(1.0)},
    "changes": {"commit_codec": "INT8"},
    "changes only": {"commit_codec": "BF16", "full_every": 4, "delta_codec": "INT4"},
    "coarse changes": {"commit_codec": "INT4", "full_every": 3, "residual_dtype": "BF16", "momentum_dtype": "BF16"},
    "changes without residual": {"commit_codec": "F8_E4M3", "full_every": 5, "residual_dtype": None},
    "bf16 master": {"master_dtype": "BF16", "momentum_dtype": "F16"},
    "bf16 master with changes": {"master_dtype": "BF16", "commit_codec": "F32", "full_every": 4},
    "eager on changes": {"alignment": Eager(), "commit_codec": "INT8", "full_every": 4},
    "heavy ball f4": {"delta_codec": "F4_E3M0", "outer": HeavyBall()},
}


def consistent(world: World, nodes: list[SimulatedNode], parameters: dict[str, Any]) -> None:
    for node in nodes:
        for name, values in node.model.values.items():
            assert np.array_equal(values, parameters[name]), (node.name, name)


@pytest.mark.parametrize("name", SETTINGS)
def test_nodes_end_on_equal_bytes(name: str) -> None:
    settings = replace(BASE, **SETTINGS[name])

    async def main(world: World) -> None:
        nodes = [world.node(node, settings=settings, min_nodes=2, steps=130) for node in ("a", "b")]
        slow = world.node("c", settings=settings, steps=60, step_seconds=0.23)
        await asyncio.sleep(9.0)
        late = world.node("d", settings=settings, steps=40)
        await ended([*nodes, slow, late])
        assert not await forks(world.shared)
        records = await tape(world.shared)
        assert len(records) >= 12 and any(len(record.participants) > 1 for record in records)
        consistent(world, nodes, await committed_parameters(world.shared))

    virtually(main)
