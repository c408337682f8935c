"""A committed payload that the store lost: written again by who holds it, and made good where nobody can."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.events import PayloadRestored, PayloadSkipped
from gradientmail_core.protocol.keys import WantedKey
from gradientmail_core.protocol.records import RoundRecord
from gradientmail_core.sim.checks import forks, tape
from gradientmail_core.sim.world import SimulatedNode
from tests.core.engine.parts import SETTINGS, Place, virtually

SLOW = replace(SETTINGS, fragments=1, sync_every=100)
CHANGES = replace(SLOW, commit_codec="INT8", full_every=4)


async def after(place: Place, versions: int) -> RoundRecord:
    """The newest record once there are so many."""
    while len(place.listed("tape/")) < versions:
        await asyncio.sleep(0.1)
    return (await tape(place.mailbox))[-1]


async def lose(place: Place, record: RoundRecord, *names: str) -> None:
    """Remove the sections of these names of a record."""
    for section in record.sections:
        if section.name in names:
            await place.mailbox.delete(section.key)


def lone(place: Place, settings: DiLoCo) -> SimulatedNode:
    return place.launch("a", settings=settings, steps=10**6)


@pytest.mark.parametrize("names", [("theta",), ("theta", "outer")])
def test_a_holder_writes_a_lost_payload_again_for_a_joiner(names: tuple[str, ...]) -> None:
    async def main(place: Place) -> None:
        holder = lone(place, SLOW)
        record = await after(place, 2)
        await lose(place, record, *names)
        joiner = place.launch("b", settings=SLOW, steps=10**6)
        while joiner.learner is None:
            await asyncio.sleep(0.1)
        assert joiner.learner.versions == (record.round,), "the very version that was lost"
        assert place.events(PayloadSkipped) == []
        written = {event.key for event in place.events(PayloadRestored)}
        assert written == {section.key for section in record.sections}, "all that the record names"
        assert not place.listed("live/wanted/") and not await forks(place.mailbox)
        for node in (holder, joiner):
            await node.kill()

    virtually(main)


def test_a_lost_change_makes_the_next_version_whole() -> None:
    """Nobody can write a decoded change again; the joiner waits for the next version, which is a whole one."""

    async def main(place: Place) -> None:
        holder = lone(place, CHANGES)
        record = await after(place, 2)
        assert [section.name for section in record.sections if section.name != "outer"][:1] == ["change"]
        await lose(place, record, "change")
        joiner = place.launch("b", settings=CHANGES, steps=10**6)
        while joiner.learner is None:
            await asyncio.sleep(0.1)
        assert joiner.learner.versions == (record.round + 1,)
        following = (await tape(place.mailbox))[-1]
        assert following.round == record.round + 1 and following.skipped is None
        assert any(section.name == "theta" for section in following.sections)
        for node in (holder, joiner):
            await node.kill()

    virtually(main)


@pytest.mark.parametrize("settings", [SLOW, CHANGES])
def test_what_nobody_holds_is_skipped_and_the_next_record_says_so(settings: Any) -> None:
    async def main(place: Place) -> None:
        first = place.launch("a", settings=settings, steps=250)
        assert first.task is not None
        await first.task
        record = (await tape(place.mailbox))[-1]
        await lose(place, record, "theta", "change", "outer")
        second = place.launch("b", settings=settings, steps=10**6)
        following = await after(place, record.round + 1)
        assert following.skipped == record.round and following.prev
        assert any(section.name == "theta" for section in following.sections), "whole, since nobody has what it follows"
        assert [event.round for event in place.events(PayloadSkipped)] == [record.round]
        third = place.launch("c", settings=settings, steps=10**6)
        while third.learner is None:
            await asyncio.sleep(0.1)
        assert third.learner.versions[0] >= following.round
        for node in (second, third):
            await node.kill()

    virtually(main)


def test_nothing_that_does_not_match_its_digest_is_written() -> None:
    async def main(place: Place) -> None:
        holder = lone(place, SLOW)
        record = await after(place, 2)
        assert holder.engine is not None
        fragment = holder.engine.fragments[0]
        fragment.theta = fragment.theta + 1
        await lose(place, record, "theta")
        await place.mailbox.put(WantedKey(record.round).path, b"{}")
        await asyncio.sleep(6)
        assert record.sections[0].key not in place.listed("blobs/")
        await holder.kill()

    virtually(main)
