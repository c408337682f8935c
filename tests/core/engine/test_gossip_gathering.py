"""Gathering shares: whom a node waits for, and for how long."""

import asyncio

import numpy as np
import pytest

from gradientmail_core.engine.gossip_gathering import Pace, Wanted, gathered, smoothed
from gradientmail_core.engine.gossip_shares import encoded_share
from gradientmail_core.events import ObjectIgnored
from gradientmail_core.protocol.gossip import ShareKey
from tests.core.engine.gossip_parts import live, virtually


async def give(place, here, node, after=0.0, body=None):
    """Put a gradient in ``node``'s name after some seconds."""
    key = ShareKey(3, "grad", 0, node)
    await asyncio.sleep(after)
    values = np.ones(here.run.layouts[0].size, np.float32)
    made = encoded_share(here.host, here.run, key, here.run.layouts[0], values, None, (20, 160))
    await place.mailbox.put(key.path, made if body is None else body)


def gathering(nodes, waited, seconds, prepare):
    """Who was found, and after how long."""

    async def main(place):
        here = await place.surroundings("a")
        giving = asyncio.ensure_future(prepare(place, here))
        keys = {node: ShareKey(3, "grad", 0, node) for node in nodes}
        wanted = Wanted(keys, here.run.layouts[0], {}, waited)
        started = place.loop.time()
        found = await gathered(here, wanted, seconds, Pace())
        took = place.loop.time() - started
        await giving
        return tuple(found), took, place

    return virtually(main)


def test_it_ends_when_everyone_has_given():
    async def prepare(place, here):
        live(here.board, "b", "c")
        await asyncio.gather(give(place, here, "b", 1.0), give(place, here, "c", 2.0))

    found, took, _ = gathering("bc", "bc", 30.0, prepare)
    assert found == ("b", "c") and 2.0 <= took < 4.0


def test_it_ends_in_time_without_those_who_are_late():
    async def prepare(place, here):
        live(here.board, "b", "c")
        await asyncio.gather(give(place, here, "b", 1.0), give(place, here, "c", 20.0))

    found, took, _ = gathering("bc", "bc", 5.0, prepare)
    assert found == ("b",) and took == pytest.approx(5.0)


def test_silent_nodes_are_taken_in_and_not_waited_for():
    async def prepare(place, here):
        live(here.board, "b", "c", "d")
        await give(place, here, "c")
        await give(place, here, "b", 1.0)

    found, took, _ = gathering("bcd", "b", 30.0, prepare)
    assert found == ("b", "c") and took < 3.0


def test_who_left_meanwhile_is_not_waited_for():
    async def prepare(place, here):
        live(here.board, "b")
        await asyncio.sleep(4.0)
        await place.mailbox.put("live/leases/b/0000000001-x0-" + "0a" * 8, b"{}")

    found, took, _ = gathering("b", "b", 60.0, prepare)
    assert found == () and 4.0 < took < 20.0


def test_who_fell_silent_is_waited_for_until_the_lease_runs_out():
    async def prepare(place, here):
        live(here.board, "b")

    found, took, _ = gathering("b", "b", 60.0, prepare)
    assert found == () and 12.0 <= took < 20.0


def test_garbage_ends_the_wait_for_its_node_and_is_reported():
    async def prepare(place, here):
        live(here.board, "b", "c")
        await give(place, here, "b", body=b"garbage")
        await give(place, here, "c", 1.0)

    found, took, place = gathering("bc", "bc", 30.0, prepare)
    assert found == ("c",) and took < 4.0
    assert [event.key for event in place.events(ObjectIgnored)] == [ShareKey(3, "grad", 0, "b").path]


@pytest.mark.parametrize(("seconds", "pause"), [(None, 1.0), (2.0, 0.25), (40.0, 2.0), (1000.0, 5.0)])
def test_pauses_follow_the_length_of_a_round(seconds, pause):
    assert Pace(round=seconds).pause_most == pytest.approx(pause)


def test_estimates_follow_what_is_measured():
    assert smoothed(None, 10.0) == 10.0
    assert 10.0 < smoothed(10.0, 20.0) < 20.0
