"""The ledger of a queue: one living holder a block, nothing lost, and no trace but one record a finished block."""

import asyncio

import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.patterns.units import Block, UnitLedger
from tests.core.patterns.party import Town, in_town


async def worked(ledger: UnitLedger, town: Town, seconds: float, trained: list[tuple[str, int]], name: str) -> None:
    while (block := await ledger.claim()) is not None:
        for unit in block.units:
            await asyncio.sleep(seconds)
            trained.append((name, unit))
        await ledger.finish(block)


def test_a_faster_node_claims_more_and_every_unit_is_worked_on_once() -> None:
    async def main(town: Town) -> None:
        trained: list[tuple[str, int]] = []
        nodes = [("fast", 1.0), ("slow", 3.0)]
        await asyncio.gather(
            *(worked(UnitLedger(town.party(name), "q", 40, 2), town, pace, trained, name) for name, pace in nodes)
        )
        assert sorted(unit for _, unit in trained) == list(range(40))
        shares = {name: sum(who == name for who, _ in trained) for name, _ in nodes}
        assert shares["fast"] >= 2 * shares["slow"] > 0
        assert town.keys("units/") == [f"units/q/{block:08d}/done" for block in range(20)]

    in_town(main)


def test_what_a_dead_node_held_is_worked_on_by_others() -> None:
    async def main(town: Town) -> None:
        victim = UnitLedger(town.party("a"), "q", 6, 3)
        assert await victim.claim() == Block(0, 0, 0, 3)
        other = UnitLedger(town.party("b"), "q", 6, 3)
        trained: list[tuple[str, int]] = []
        task = asyncio.ensure_future(worked(other, town, 0.1, trained, "b"))
        await asyncio.sleep(20)
        assert not task.done() and [unit for _, unit in trained] == [3, 4, 5], "b waits for what a still holds"
        town.dead.add("a")
        await task
        assert [unit for _, unit in trained] == [3, 4, 5, 0, 1, 2]

    in_town(main)


def test_a_released_block_goes_on_where_it_was_left() -> None:
    async def main(town: Town) -> None:
        first, second = UnitLedger(town.party("a"), "q", 5, 5), UnitLedger(town.party("b"), "q", 5, 5)
        block = await first.claim()
        assert block is not None
        await first.release(Block(block.index, block.number, block.first, block.last, 3))
        taken = await second.claim()
        assert taken is not None and list(taken.units) == [3, 4] and taken.number == 1

    in_town(main)


def test_a_restarted_node_has_its_block_back_at_once_and_goes_on_from_its_checkpoint() -> None:
    async def main(town: Town) -> None:
        await UnitLedger(town.party("a"), "q", 10, 10).claim()
        again = UnitLedger(town.party("a"), "q", 10, 10)
        again.came_so_far({0: 4})
        block = await again.claim()
        assert block is not None and list(block.units) == [4, 5, 6, 7, 8, 9] and town.loop.time() < 1

    in_town(main)


def test_without_waiting_there_is_nothing_while_others_hold_the_rest() -> None:
    async def main(town: Town) -> None:
        first, second = UnitLedger(town.party("a"), "q", 2, 1), UnitLedger(town.party("b"), "q", 2, 1)
        held = [await ledger.claim(wait=False) for ledger in (first, second)]
        assert [block.first for block in held if block is not None] == [0, 1]
        assert await first.claim(wait=False) is None and not first.finished and town.loop.time() < 1
        town.dead.add("b")
        taken = await first.claim(wait=False)
        assert taken is not None and taken.first == 1

    in_town(main)


def test_a_node_keeps_what_it_holds_though_nobody_hears_of_it() -> None:
    async def main(town: Town) -> None:
        ledger = UnitLedger(town.party("a"), "q", 1, 1)
        assert await ledger.claim() is not None
        town.dead.add("a")
        assert await ledger.claim(wait=False) is None

    in_town(main)


def test_what_was_finished_while_this_node_looked_is_not_claimed_again() -> None:
    """Its claims are gone with that, so a claim succeeds and means nothing."""

    async def main(town: Town) -> None:
        slow, quick = UnitLedger(town.party("a"), "q", 2, 1), UnitLedger(town.party("b"), "q", 2, 1)
        look = slow.look

        async def late() -> None:
            await look()
            if not quick.finished:
                await worked(quick, town, 0.0, [], "b")

        slow.look = late  # type: ignore[method-assign]  # to be late on purpose
        assert await slow.claim() is None
        assert town.keys("units/") == [f"units/q/{block:08d}/done" for block in range(2)]

    in_town(main)


def test_strangers_objects_stop_nothing() -> None:
    async def main(town: Town) -> None:
        for key in ("units/q/00000000/claim-0000", "units/q/readme", "units/q/00000099/done", "units/q/00000001/other"):
            await town.mailbox.put(key, b"junk")
        trained: list[tuple[str, int]] = []
        await worked(UnitLedger(town.party("a"), "q", 4, 2), town, 0.1, trained, "a")
        assert sorted(unit for _, unit in trained) == [0, 1, 2, 3]

    in_town(main)


@pytest.mark.parametrize(("name", "units", "block"), [("../x", 4, 2), ("q", -1, 2), ("q", 4, 0)])
def test_queues_that_cannot_be_dealt_are_refused(name: str, units: int, block: int) -> None:
    async def main(town: Town) -> None:
        with pytest.raises(ConfigurationError):
            UnitLedger(town.party("a"), name, units, block)

    in_town(main)
