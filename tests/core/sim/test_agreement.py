"""Nodes that differ from the tape or from what the store gives back are seen; those of a sound run are not."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine import closing
from gradientmail_core.engine.loading import Source
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.protocol.plan import manifest_layouts
from gradientmail_core.sim.agreement import behind, differing, fragments_of, strangers
from gradientmail_core.sim.checks import manifest_of, tape
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.world import SimulatedNode

NARROW = DiLoCo(sync_every=4, fragments=2, master_dtype="BF16", momentum_dtype="BF16", residual_dtype="BF16")
SETTINGS = [NARROW, DiLoCo(sync_every=4, fragments=2), replace(NARROW, commit_codec="INT8", full_every=3)]


def played(settings: DiLoCo, look: Callable[[MemoryMailbox, SimulatedNode], Awaitable[None]]) -> None:
    """Let a node train for a while, and ``look`` at it and its store while it lives."""

    async def main(loop: VirtualLoop) -> None:
        store = MemoryMailbox("agreed")
        node = SimulatedNode("a", store, settings, VirtualClock(loop), seed=1, steps=10**6).launch()
        await asyncio.sleep(10.0)
        await look(store, node)
        await node.kill()

    run_virtually(main)


async def differences(store: MemoryMailbox, node: SimulatedNode) -> list[str]:
    manifest, _ = await manifest_of(store)
    layouts = manifest_layouts(manifest)
    assert isinstance(layouts, tuple)
    sources = [Source(store, node.clock, manifest, layout) for layout in layouts]
    return [one for source in sources async for one in differing(node, source)]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_sound_node_goes_on_from_what_is_stored(settings: DiLoCo) -> None:
    async def look(store: MemoryMailbox, node: SimulatedNode) -> None:
        assert all(fragment.outer is not None and fragment.head.version > 2 for fragment in fragments_of(node))
        assert await differences(store, node) == []
        assert list(strangers([node], await tape(store))) == []

    played(settings, look)


def test_other_parameters_and_another_outer_state_are_seen() -> None:
    async def look(store: MemoryMailbox, node: SimulatedNode) -> None:
        fragment = fragments_of(node)[1]
        fragment.theta = fragment.theta + np.float32(1e-3)
        assert fragment.outer is not None
        fragment.outer.arrays[0][0] += np.float32(1e-3)
        found = await differences(store, node)
        first, second = found
        assert "other parameters" in first and "another outer state" in second

    played(NARROW, look)


def test_a_closer_that_keeps_more_digits_than_it_stores_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(store: MemoryMailbox, node: SimulatedNode) -> None:
        assert any("outer state" in one for one in await differences(store, node))

    monkeypatch.setattr(closing, "restated", lambda values, codec: None)
    played(NARROW, look)


def test_a_head_that_is_not_the_tapes_and_one_that_stands_still_are_seen() -> None:
    async def look(store: MemoryMailbox, node: SimulatedNode) -> None:
        records = await tape(store)
        fragment = fragments_of(node)[0]
        version = fragment.head.version
        assert list(behind([node], {0: version, 1: 0})) == []
        assert list(behind([node], {0: version + 1, 1: 0})) == [("a", 0)]
        fragment.head = replace(fragment.head, digest="0" * 64)
        (stranger,) = strangers([node], records)
        assert "another record" in stranger

    played(NARROW, look)


def test_who_has_not_begun_is_behind() -> None:
    async def main(loop: VirtualLoop) -> None:
        node = SimulatedNode("late", MemoryMailbox(), NARROW, VirtualClock(loop), seed=1, steps=1)
        assert list(behind([node], {0: 0})) == [("late", 0)] and fragments_of(node) == ()

    run_virtually(main)
