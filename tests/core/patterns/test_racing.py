"""The patterns where two creates at once may both succeed, and where nothing keeps two nodes apart."""

import asyncio
import threading

import pytest

import gradientmail_core as gm
from gradientmail_core.errors import MailboxUnsupported
from gradientmail_core.mailbox.base import StoreClass
from gradientmail_core.patterns.barrier import pass_barrier
from gradientmail_core.patterns.party import Party
from gradientmail_core.patterns.ranks import Ranks
from gradientmail_core.patterns.units import UnitLedger
from gradientmail_core.sim.world import ToyModel
from tests.core.mailbox.defective import Incapable, Racing
from tests.core.patterns.party import Town, in_town

NODES = "abcd"


def parties(town: Town, store: StoreClass) -> list[Party]:
    """Nodes on a store that looks, and writes a second later."""
    town.mailbox = racing = Racing("town")
    racing.gap = 1.0
    return [town.party(node, store) for node in NODES]


def test_every_unit_is_worked_on_once() -> None:
    async def main(town: Town) -> None:
        worked: list[int] = []

        async def work(party: Party) -> None:
            ledger = UnitLedger(party, "data", 12, 2)
            while (block := await ledger.claim()) is not None:
                worked.extend(block.units)
                await asyncio.sleep(5.0)
                await ledger.finish(block)

        await asyncio.gather(*map(work, parties(town, "racy")))
        assert sorted(worked) == list(range(12))

    in_town(main)


def test_ranks_are_all_different_and_a_late_overwrite_is_noticed() -> None:
    async def main(town: Town) -> None:
        ranks = [Ranks(party, 4) for party in parties(town, "racy")]
        held = await asyncio.gather(*(each.take() for each in ranks))
        assert {key.rank for key in held} == set(range(4))
        assert all([await each.holds(key) for each, key in zip(ranks, held, strict=True)])
        await town.mailbox.put(held[0].path, town.party("late", "racy").claim().encoded())
        assert not await ranks[0].holds(held[0])

    in_town(main)


def test_without_the_precaution_two_would_hold_the_same_rank() -> None:
    async def main(town: Town) -> None:
        ranks = [Ranks(party, 4) for party in parties(town, "atomic")]
        held = await asyncio.gather(*(each.take() for each in ranks))
        assert len({key.rank for key in held}) < 4

    in_town(main)


def test_a_barrier_opens_on_any_store() -> None:
    async def main(town: Town) -> None:
        await asyncio.gather(*(pass_barrier(party, "start", 4) for party in parties(town, "racy")))

    in_town(main)


def test_where_nothing_keeps_nodes_apart_claims_are_refused() -> None:
    async def main(town: Town) -> None:
        party = town.party("a", "none")
        with pytest.raises(MailboxUnsupported, match="Ranks must be claimed") as caught:
            Ranks(party, 4)
        assert "fixed slice" in caught.value.remedy and "doctor" in caught.value.remedy
        with pytest.raises(MailboxUnsupported, match="Units of a shared queue must be claimed"):
            UnitLedger(party, "data", 4, 1)

    in_town(main)


def test_a_session_with_a_named_syncer_meets_at_barriers_and_has_no_ranks() -> None:
    mailbox, settings = Incapable("run"), gm.DiLoCo(sync_every=4, fragments=2)

    def session(node: str, ranks: int | None = None) -> gm.Session:
        model = ToyModel()
        return gm.Session(model, mailbox=mailbox, algorithm=settings, node=node, syncer="a", ranks=ranks, callbacks=[])

    with session("a") as first, session("b") as second:
        other = threading.Thread(target=lambda: second.barrier("start", 2, timeout=60))
        other.start()
        first.barrier("start", 2, timeout=60)
        other.join(60)
        with pytest.raises(MailboxUnsupported, match="Units"):
            first.shared_queue(units=4)
    with pytest.raises(MailboxUnsupported, match="Ranks"):
        session("a", ranks=2).join()
