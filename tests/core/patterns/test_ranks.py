"""Ranks: one living holder each, taken over from the dead, handed back to the slow."""

import asyncio

import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.patterns.ranks import Ranks
from gradientmail_core.protocol.recipes import RankKey
from tests.core.patterns.party import Town, in_town


def test_every_node_gets_a_rank_of_its_own_and_who_comes_too_late_waits() -> None:
    async def main(town: Town) -> None:
        keys = await asyncio.gather(*(Ranks(town.party(node), 3).take() for node in "abc"))
        assert sorted(key.rank for key in keys) == [0, 1, 2]
        late = asyncio.ensure_future(Ranks(town.party("d"), 3).take())
        await asyncio.sleep(30)
        assert not late.done() and any("all 3 ranks are held" in str(event) for event in town.events)
        town.dead.add("b")
        assert (await late).rank == keys[1].rank

    in_town(main)


def test_a_slow_node_has_its_rank_back_and_the_taker_learns_it() -> None:
    async def main(town: Town) -> None:
        slow, taker = Ranks(town.party("slow"), 1), Ranks(town.party("taker"), 1)
        own = await slow.take()
        town.dead.add("slow")
        taken = await taker.take()
        assert taken == RankKey(0, 1) and await taker.holds(taken)
        town.dead.remove("slow")
        assert await slow.holds(own)
        assert not await taker.holds(taken)
        assert town.keys("ranks/") == [own.path], "the taker's term is gone"

    in_town(main)


def test_a_restarted_node_keeps_its_rank_and_drops_what_it_left_elsewhere() -> None:
    async def main(town: Town) -> None:
        party = town.party("a")
        await town.mailbox.put(RankKey(2, 5).path, party.claim().encoded())
        await town.mailbox.put(RankKey(1, 0).path, party.claim().encoded())
        await town.mailbox.put(RankKey(0, 0).path, b"junk")
        assert await Ranks(town.party("a"), 3).take() == RankKey(1, 0)
        assert RankKey(2, 5).path not in town.keys("ranks/")

    in_town(main)


def test_a_rank_given_up_is_free_at_once() -> None:
    async def main(town: Town) -> None:
        first = Ranks(town.party("a"), 1)
        await first.drop(await first.take())
        assert (await Ranks(town.party("b"), 1).take()).rank == 0

    in_town(main)


@pytest.mark.parametrize("count", [0, -1, 10_000])
def test_counts_that_no_key_holds_are_refused(count: int) -> None:
    async def main(town: Town) -> None:
        with pytest.raises(ConfigurationError):
            Ranks(town.party("a"), count)

    in_town(main)
