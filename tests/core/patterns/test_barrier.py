"""A barrier holds nodes until enough living ones are there, and then for nobody any more."""

import asyncio

import pytest

from gradientmail_core.errors import ConfigurationError, WaitTimeout
from gradientmail_core.patterns.barrier import pass_barrier
from tests.core.patterns.party import Town, in_town


async def passed(town: Town, node: str, at: float, through: dict[str, float], count: int = 3) -> None:
    await asyncio.sleep(at)
    await pass_barrier(town.party(node), "epoch-1", count)
    through[node] = town.loop.time()


def test_all_pass_once_the_last_has_arrived_and_a_latecomer_at_once() -> None:
    async def main(town: Town) -> None:
        through: dict[str, float] = {}
        await asyncio.gather(*(passed(town, node, at, through) for node, at in (("a", 0), ("b", 4), ("c", 30))))
        assert all(30 <= time <= 33 for time in through.values()), through
        await passed(town, "d", 60, through)
        assert through["d"] == town.loop.time()
        assert any("waiting for 2 more (here: a)" in str(event) for event in town.events)

    in_town(main)


def test_who_died_while_waiting_does_not_count() -> None:
    async def main(town: Town) -> None:
        through: dict[str, float] = {}
        victim = asyncio.ensure_future(passed(town, "a", 0, through, 2))
        await asyncio.sleep(5)
        victim.cancel()
        town.dead.add("a")
        waiting = asyncio.ensure_future(passed(town, "b", 0, through, 2))
        await asyncio.sleep(20)
        assert not waiting.done()
        await passed(town, "c", 0, through, 2)
        await waiting
        assert set(through) == {"b", "c"}

    in_town(main)


def test_a_timeout_says_who_was_there_and_withdraws() -> None:
    async def main(town: Town) -> None:
        with pytest.raises(WaitTimeout, match="Only 1 of 2 nodes"):
            await pass_barrier(town.party("a"), "start", 2, timeout=5.0)
        assert not town.keys("barriers/")
        with pytest.raises(ConfigurationError):
            await pass_barrier(town.party("a"), "start", 0)

    in_town(main)
