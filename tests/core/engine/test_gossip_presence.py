"""A gossip node's beats."""

import asyncio

import pytest

from gradientmail_core.engine.gossip_presence import Presence
from gradientmail_core.engine.run import Board
from gradientmail_core.errors import RunMismatch
from gradientmail_core.events import RunWaited
from gradientmail_core.protocol.keys import LeaseKey, parse_live
from tests.core.engine.gossip_parts import TIMEOUTS, virtually


async def other_beats(place, node, beat=0, state="t", tag="0b" * 8):
    await place.mailbox.put(LeaseKey(node, beat, state, 0, tag).path, b"{}")


def presence_at(place, node="a"):
    host = place.host(node)
    board = Board(host)
    return Presence(host, board, lambda: 7), board


def test_a_start_continues_after_the_highest_beat_and_keeps_one_before():
    async def main(place):
        presence, _ = presence_at(place)
        old = [LeaseKey("a", beat, "t", 3, "0b" * 8) for beat in (4, 5)]
        for lease in old:
            await place.mailbox.put(lease.path, b"{}")
        await presence.enter(old)
        await presence.beat("t")
        return place.listed("live/leases/a/")

    first, second = virtually(main)
    assert "0000000006-j7" in first and "0000000007-t7" in second


def test_a_living_node_of_the_same_name_is_refused():
    async def main(place):
        presence, _ = presence_at(place)
        await presence.enter([])
        await other_beats(place, "a", beat=3)
        await presence.look()
        await other_beats(place, "a", beat=9)
        await presence.look()

    with pytest.raises(RunMismatch, match="Another process"):
        virtually(main)


def test_the_last_beat_of_a_dead_process_is_passed():
    async def main(place):
        presence, _ = presence_at(place)
        await presence.enter([])
        await other_beats(place, "a", beat=3)
        await presence.look()
        await presence.look()
        await asyncio.sleep(0.1)
        return presence._lease.newest

    assert virtually(main).beat > 3


def test_a_beat_that_landed_after_it_was_replaced_does_not_stay():
    async def main(place):
        presence, board = presence_at(place)
        await presence.enter([])
        for _ in range(3):
            await presence.beat("t")
        await place.mailbox.put(LeaseKey("a", 1, "t", 7, board.host.incarnation).path, b"{}")
        listing = asyncio.ensure_future(presence.keep_listing())
        await asyncio.sleep(2 * TIMEOUTS.period)
        listing.cancel()
        return [parse_live(key).beat for key in place.listed("live/leases/a/")]

    assert virtually(main) == [2, 3]


def test_it_waits_for_so_many_nodes_and_says_so():
    async def main(place):
        presence, _ = presence_at(place)
        await presence.enter([])
        await presence.beat("w")
        waiting = asyncio.ensure_future(presence.wait_for(2))
        await asyncio.sleep(5.0)
        assert not waiting.done()
        await other_beats(place, "b", state="w")
        await waiting
        return place.events(RunWaited), presence._board.here()

    waited, present = virtually(main)
    assert "1 more node" in str(waited[0]) and present == ["a", "b"]


def test_leases_of_those_who_left_are_buried_later():
    async def main(place):
        presence, _ = presence_at(place)
        await presence.enter([])
        await other_beats(place, "b", state="x")
        await other_beats(place, "c")
        await presence.look()
        await presence.bury()
        before = place.listed("live/leases/")
        await asyncio.sleep(TIMEOUTS.lease + 1)
        await presence.bury()
        return before, place.listed("live/leases/")

    before, after = virtually(main)
    assert len(before) == 3
    assert sorted(key.split("/")[2] for key in after) == ["a", "c"]
