"""Two hundred updates of 1e-4, far below what bf16 resolves near 1, move a bf16 model as they move an fp32 one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.merge import WeightedMean
from gradientmail_core.algorithms.outer import SGD
from gradientmail_core.engine import aligning
from gradientmail_core.sim.checks import committed_parameters, tape
from gradientmail_core.sim.world import ToyModel, ended
from gradientmail_core.tensors.codec_float import round_to_bf16, widen_bf16
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout
from tests.scenarios.test_simulated_runs import World, virtually

UPDATES, UPDATE, STEPS = 200, 1e-4, 2
SETTINGS = DiLoCo(
    sync_every=STEPS, fragments=1, in_flight=1, overlap_steps=0, quorum_size=2, grace_seconds=5.0, follow=False,
    merge=WeightedMean(), outer=SGD(lr=1.0), delta_codec="F32",
)  # fmt: skip


class Moving(ToyModel):
    """An fp32 model whose every step moves it so that half of a round's delta is one update."""

    def train(self, noise: np.random.Generator) -> None:
        for values in self.values.values():
            values -= np.float32(2 * UPDATE / STEPS)


class Resting(ToyModel):
    """A model that trains nothing by itself, in fp32 or in bf16."""

    half = False

    def train(self, noise: np.random.Generator) -> None:
        pass

    def write(self, layout: FragmentLayout, values: Flat) -> None:
        if self.half:
            patterns, rounded = np.empty(values.size, np.uint16), np.empty_like(values)
            round_to_bf16(np.ascontiguousarray(values), patterns)
            widen_bf16(patterns, rounded)
            values = rounded
        super().write(layout, values)


class HalfResting(Resting):
    half = True


def ends_at(follower: type[Resting], **formats: Any) -> tuple[float, float]:
    """The committed value and the follower's, both from 1, after the updates."""
    settings = replace(SETTINGS, **formats)

    async def main(world: World) -> tuple[float, float]:
        models = (Moving(tensors=1, fill=1.0), follower(tensors=1, fill=1.0))
        nodes = [
            world.node(name, settings=settings, steps=UPDATES * STEPS, min_nodes=2, model=model)
            for name, model in zip("ab", models, strict=True)
        ]
        await ended(nodes)
        assert [len(record.participants) for record in await tape(world.shared)] == [2] * UPDATES
        (committed,) = (await committed_parameters(world.shared)).values()
        (mine,) = nodes[1].model.values.values()
        return float(committed[0]), float(mine[0])

    found: tuple[float, float] = virtually(main)
    return found


def test_a_bf16_model_moves_as_an_fp32_model_does() -> None:
    exact, _ = ends_at(Resting)
    assert exact == pytest.approx(1.0 - UPDATES * UPDATE, abs=1e-4)
    committed, mine = ends_at(HalfResting)
    assert committed == pytest.approx(exact, abs=1e-6)
    assert mine == pytest.approx(exact, abs=2.0**-9)
    with_residual, _ = ends_at(HalfResting, master_dtype="BF16")
    assert with_residual == pytest.approx(exact, abs=2.0**-8)


def test_without_the_fp32_master_it_does_not_move() -> None:
    assert ends_at(HalfResting, master_dtype="BF16", residual_dtype=None) == (1.0, 1.0)


def test_nor_if_a_bf16_node_claimed_its_own_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligning, "_rounds", lambda model, layout: False)
    committed, mine = ends_at(HalfResting)
    assert committed > 1.0 - 4 * UPDATE and mine == 1.0
