"""Closing a round as it happens: what others publish arrives or not, and the first commit counts for everyone."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.algorithms.merge import WeightedMean
from gradientmail_core.algorithms.outer import SGD, Nesterov
from gradientmail_core.engine.closer import LOOK_PERIODS
from gradientmail_core.engine.closing import outer_layout
from gradientmail_core.engine.polling import OVERDUE_LEAST
from gradientmail_core.events import RoundCommitted, RoundLost
from gradientmail_core.mailbox import MeteredMailbox
from gradientmail_core.mailbox.base import Body
from gradientmail_core.protocol.exchange import get_section, put_section
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import DeltaKey, HeadKey, tape_key
from gradientmail_core.protocol.records import Estimates, RoundRecord
from tests.core.engine.parts import SETTINGS, TIMEOUTS, Bench, Place, virtually

PLAIN = replace(SETTINGS, merge=WeightedMean(), outer=SGD(lr=1.0), grace_seconds=3.0)
MOMENTUM = replace(PLAIN, outer=Nesterov(lr=1.0, momentum=0.5, warmup=0.0))


def bench(main: Any, settings: Any = PLAIN) -> None:
    async def placed(place: Place) -> None:
        await main(await Bench.of(place, "a", settings))

    virtually(placed)


def closed(found: Bench) -> RoundRecord:
    record = found.chain.head.record
    assert record is not None
    return record


def merged(record: RoundRecord) -> list[str]:
    return [participant.node for participant in record.participants]


def refused(record: RoundRecord) -> dict[str, str]:
    return {refusal.node: refusal.reason for refusal in record.refusals}


def test_a_round_closes_as_soon_as_everybody_has_reported() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b")
        found.publish(1.0)
        await found.snapshot("b", 2.0)
        head = await found.advanced(within=1.0)
        assert head.version == 1 and merged(closed(found)) == ["a", "b"]
        assert found.chain.theta == pytest.approx(-1.5)
        section = head.section("theta")
        assert section is not None
        stored = await get_section(found.place.mailbox, found.host.clock, section, found.chain.layout)
        assert not isinstance(stored, Rejected) and stored.tobytes() == found.chain.theta.tobytes()
        assert [event.participants for event in found.place.events(RoundCommitted)] == [("a", "b")]

    bench(main)


def test_after_quorum_it_waits_for_the_grace_and_no_longer() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b")
        found.publish()
        task = asyncio.ensure_future(found.advanced())
        await asyncio.sleep(2.5)
        assert await found.record() is None
        await task
        assert 3.0 <= found.place.loop.time() <= 3.5
        assert merged(closed(found)) == ["a"]

    bench(main)


def test_who_comes_within_the_grace_is_merged() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b", "c")
        found.publish()
        task = asyncio.ensure_future(found.advanced())
        await asyncio.sleep(2.9)
        await found.snapshot("b")
        await task
        assert merged(closed(found)) == ["a", "b"]

    bench(main)


def test_a_quorum_of_two_waits_for_two_and_a_dead_node_is_not_waited_for() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b", "c")
        found.publish()
        task = asyncio.ensure_future(found.advanced())
        await asyncio.sleep(TIMEOUTS.lease - 1)
        found.live("a", beat=1)
        assert await found.record() is None
        await task
        assert merged(closed(found)) == ["a"]

    bench(main, replace(PLAIN, quorum_size=2, grace_seconds=0.0))


def test_what_cannot_be_merged_is_named_with_its_reason() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b", "c", "d", "e")
        found.publish()
        await found.snapshot("b", np.nan)
        await found.snapshot("c", record="9" * 64)
        await found.snapshot("d", steps=0)
        await found.place.mailbox.put(DeltaKey(found.chain.round, "e").path, b"garbage")
        await found.advanced(within=5.0)
        assert merged(closed(found)) == ["a"]
        assert refused(closed(found)) == {"b": "nonfinite", "c": "stale", "d": "zero_steps", "e": "corrupt"}

    bench(main)


def test_a_round_of_nothing_but_refusals_is_void_and_the_chain_goes_on() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b")
        before = found.chain.head
        found.publish(np.nan)
        await found.snapshot("b", np.inf)
        await found.advanced()
        record = closed(found)
        assert record.void and record.sections == before.sections
        assert refused(record) == {"a": "nonfinite", "b": "nonfinite"}
        assert (found.chain.theta == 0.0).all()
        found.publish(1.0)
        await found.snapshot("b", 1.0)
        await found.advanced()
        assert merged(closed(found)) == ["a", "b"] and found.chain.theta == pytest.approx(-1.0)

    bench(main)


def test_a_result_that_is_not_finite_is_void_too() -> None:
    async def main(found: Bench) -> None:
        found.live("a")
        found.publish(3e38)
        with np.errstate(over="ignore", invalid="ignore"):
            await found.advanced()
        assert closed(found).void and refused(closed(found)) == {"a": "nonfinite"}

    bench(main, replace(PLAIN, outer=SGD(lr=2.0)))


def test_an_outlier_is_refused_once_the_chain_is_grown() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b")
        for _ in range(3):
            found.publish(1.0)
            await found.snapshot("b", 1.0)
            await found.advanced()
        found.publish(1.0)
        await found.snapshot("b", 50.0)
        await found.advanced()
        assert merged(closed(found)) == ["a"] and refused(closed(found)) == {"b": "outlier"}

    bench(main)


def test_a_snapshot_that_nobody_announced_is_merged_if_it_is_there_at_the_end() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b", "c")
        found.publish()
        task = asyncio.ensure_future(found.advanced())
        await asyncio.sleep(1.0)
        found.board.listed([DeltaKey(found.chain.round, "f")])
        await found.snapshot("f")
        await task
        assert merged(closed(found)) == ["a", "f"]

    bench(main)


@pytest.mark.parametrize(("nodes", "most_gets", "most_lists"), [(5, 40, 0), (40, 45, 16), (160, 165, 16)])
def test_what_a_round_asks_grows_with_what_is_there_and_not_with_nodes_times_questions(
    nodes: int, most_gets: int, most_lists: int
) -> None:
    """Half of the nodes report late, while the closer asks again and again; each snapshot is read once."""

    async def placed(place: Place) -> None:
        metered = MeteredMailbox(place.mailbox)
        found = await Bench.of(place, "a", replace(PLAIN, quorum_size=nodes, grace_seconds=0.0), metered)
        others = [f"n{number:03d}" for number in range(nodes - 1)]
        found.others |= {name: replace(found.others["b"], node=name) for name in others}
        found.live("a", *others)
        before = metered.usage
        found.publish()
        task = asyncio.ensure_future(found.advanced())
        for name in others[: len(others) // 2]:
            await found.snapshot(name)
        await asyncio.sleep(9.0)
        for name in others[len(others) // 2 :]:
            await found.snapshot(name)
        await task
        assert len(merged(closed(found))) == nodes
        spent = metered.usage.since(before)
        assert spent.gets <= most_gets and spent.lists <= most_lists

    virtually(placed)


def test_absurd_claims_do_not_end_the_round() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b")
        found.publish()
        await found.snapshot("b", step_seconds=1e308, tokens=2**53, steps=2**31)
        await found.advanced(within=10.0)
        assert merged(closed(found)) == ["a", "b"]

    bench(main, replace(PLAIN, grace_seconds=None))


def test_a_flood_of_strangers_snapshots_does_not_end_the_round() -> None:
    async def main(found: Bench) -> None:
        found.live("a")
        found.board.listed([DeltaKey(found.chain.round, f"stranger{number}") for number in range(1500)])
        for number in range(1500):
            await found.place.mailbox.put(DeltaKey(found.chain.round, f"stranger{number}").path, b"garbage")
        found.publish()
        await found.advanced(within=10.0)
        assert merged(closed(found)) == ["a"] and len(closed(found).refusals) == 1000

    bench(main)


def test_garbage_in_slot_0_sends_the_record_to_slot_1() -> None:
    async def main(found: Bench) -> None:
        await found.place.mailbox.put(tape_key(found.chain.round, 0), b"garbage")
        found.live("a")
        found.publish()
        round = found.chain.round
        await found.advanced()
        assert await found.place.mailbox.get(tape_key(round, 1)) == closed(found).encoded()

    bench(main)


class Overtaken:
    """A mailbox in which node ``b`` commits the round just before the first payload of node ``a`` arrives."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.bench: Bench | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place.mailbox, name)

    async def put(self, key: str, body: Body) -> None:
        if self.bench is not None and key.startswith("blobs/"):
            found, self.bench = self.bench, None
            await found.commit(node="b", fill=7.0, closer="a")
        await self._place.mailbox.put(key, body)


def test_the_loser_of_a_race_goes_on_from_the_winner_and_leaves_nothing() -> None:
    async def placed(place: Place) -> None:
        overtaken = Overtaken(place)
        overtaken.bench = found = await Bench.of(place, "a", PLAIN, overtaken)
        found.live("a")
        mine = found.publish()
        await found.advanced()
        assert closed(found).node == "b" and (found.chain.theta == 7.0).all()
        assert [event.winner for event in place.events(RoundLost)] == ["b"]
        assert not any("/a-" in key for key in place.listed("blobs/0000000002/"))
        assert mine not in {participant.snapshot for participant in closed(found).participants}

    virtually(placed)


def test_a_hint_at_a_newer_commit_ends_the_closing() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b")
        task = asyncio.ensure_future(found.advanced())
        await asyncio.sleep(0.1)
        winner = await found.commit(node="b", closer="a")
        found.board.listed([HeadKey(0, 2)])
        await asyncio.sleep(0.1)
        assert found.chain.head.digest == winner.digest
        await task

    bench(main)


def test_a_closer_that_hears_nothing_looks_whether_another_has_gone_on() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b")
        winner = await found.commit(node="b", closer="a")
        await found.advanced(within=(LOOK_PERIODS + 1) * TIMEOUTS.period)
        assert found.chain.head.digest == winner.digest

    bench(main)


def test_a_closer_whose_round_is_overdue_looks_before_that() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b")
        timed = Estimates(step=0.1, quorum=0.1, sync=0.1, grace=0.1)
        found.chain.head = replace(found.chain.head, seen=found.host.clock.now(), interval=2.0, estimates=timed)
        winner = await found.commit(node="b", closer="a")
        await found.advanced(within=2.0 + OVERDUE_LEAST + 1.0)
        assert found.chain.head.digest == winner.digest and LOOK_PERIODS * TIMEOUTS.period > 2.0 + OVERDUE_LEAST + 1.0

    bench(main)


def test_a_round_of_last_snapshots_moves_without_momentum_and_leaves_it_as_it_was() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b")
        found.publish(1.0)
        await found.snapshot("b", 1.0)
        await found.advanced()
        assert found.chain.theta == pytest.approx(-1.5)
        found.publish(2.0, final=True)
        await found.snapshot("b", 4.0, final=True)
        await found.advanced()
        assert closed(found).final and found.chain.theta == pytest.approx(-4.5)
        found.publish(1.0)
        await found.snapshot("b", 1.0, final=True)
        await found.advanced()
        assert not closed(found).final and found.chain.theta == pytest.approx(-4.5 - 1.75)

    bench(main, MOMENTUM)


def test_a_hint_at_a_round_that_does_not_exist_costs_little() -> None:
    async def placed(place: Place) -> None:
        metered = MeteredMailbox(place.mailbox)
        found = await Bench.of(place, "a", PLAIN, metered)
        found.live("a", "b")
        found.board.listed([HeadKey(0, 9_999_999_998)])
        before = metered.usage
        await found.kept(60.0)
        assert metered.usage.since(before).requests < 3 * 60

    virtually(placed)


# -- the outer optimizer's state ---------------------------------------------------------------------------


async def stored_momentum(found: Bench) -> float:
    """The one value that the head's outer state holds everywhere."""
    section = found.chain.head.section("outer")
    assert section is not None
    layout = outer_layout(found.chain.layout, ("momentum",))
    flat = await get_section(found.place.mailbox, found.host.clock, section, layout)
    assert not isinstance(flat, Rejected) and len(set(flat)) == 1
    return float(flat[0])


async def committed_by_b(found: Bench, fill: float, momentum: float) -> None:
    """Another node commits the open round with parameters and outer state of its own."""
    values = np.full(found.chain.layout.size, momentum, np.float32)
    layout = outer_layout(found.chain.layout, ("momentum",))
    clock, mailbox = found.host.clock, found.place.mailbox
    outer = await put_section(mailbox, clock, "outer", found.chain.round, "b", layout, values)
    theta = await put_section(
        mailbox,
        clock,
        "theta",
        found.chain.round,
        "b",
        found.chain.layout,
        np.full(found.chain.layout.size, fill, np.float32),
    )
    await found.commit(node="b", closer="a", sections=(theta, outer))
    await found.advanced()


async def close(found: Bench, delta: float) -> None:
    found.publish(delta)
    await found.advanced()


def test_the_outer_state_is_carried_from_commit_to_commit() -> None:
    async def main(found: Bench) -> None:
        found.live("a")
        await close(found, 1.0)
        assert await stored_momentum(found) == 1.0
        await close(found, 1.0)
        assert await stored_momentum(found) == 1.5

    bench(main, MOMENTUM)


def test_the_outer_state_of_anothers_commit_is_read_from_the_store() -> None:
    async def main(found: Bench) -> None:
        found.live("a")
        await close(found, 1.0)
        await committed_by_b(found, fill=0.0, momentum=8.0)
        await close(found, 1.0)
        assert await stored_momentum(found) == 5.0

    bench(main, MOMENTUM)


@pytest.mark.parametrize("voids", [1, 2])
def test_a_void_round_keeps_the_outer_state_that_it_names(voids: int) -> None:
    async def main(found: Bench) -> None:
        found.live("a")
        await close(found, 1.0)
        for _ in range(voids):
            await close(found, np.nan)
        await close(found, 1.0)
        assert await stored_momentum(found) == 1.5

    bench(main, MOMENTUM)


def test_a_void_round_after_anothers_commit_does_not_bring_back_an_older_state() -> None:
    async def main(found: Bench) -> None:
        found.live("a")
        await close(found, 1.0)
        await committed_by_b(found, fill=0.0, momentum=8.0)
        await close(found, np.nan)
        assert closed(found).void
        await close(found, 1.0)
        assert await stored_momentum(found) == 5.0

    bench(main, MOMENTUM)


def test_an_outer_state_that_is_lost_starts_anew_after_one_lease() -> None:
    async def main(found: Bench) -> None:
        found.live("a")
        await committed_by_b(found, fill=0.0, momentum=8.0)
        section = found.chain.head.section("outer")
        assert section is not None
        await found.place.mailbox.delete(section.key)
        before = found.place.loop.time()
        await close(found, 1.0)
        assert TIMEOUTS.lease <= found.place.loop.time() - before <= TIMEOUTS.lease + 5.0
        assert await stored_momentum(found) == 1.0

    bench(main, MOMENTUM)


class Slow:
    """A mailbox that does not find an outer state for once, and takes two lease time-outs to say so."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.key = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place.mailbox, name)

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        if key != self.key:
            return await self._place.mailbox.get(key, limit=limit)
        self.key = ""
        await asyncio.sleep(2 * TIMEOUTS.lease)
        return None


def test_an_outer_state_that_one_long_question_did_not_find_is_not_lost() -> None:
    async def main(place: Place) -> None:
        slow = Slow(place)
        found = await Bench.of(place, "a", MOMENTUM, mailbox=slow)
        found.live("a")
        await committed_by_b(found, fill=0.0, momentum=8.0)
        section = found.chain.head.section("outer")
        assert section is not None
        slow.key = section.key
        await close(found, 1.0)
        assert not slow.key and await stored_momentum(found) == 5.0

    virtually(main)
