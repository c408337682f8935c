"""Following: the commit is asked for when it is due, and a closer that left, died or dawdles is replaced once."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gradientmail_core.engine.election import rendezvous
from gradientmail_core.engine.polling import overdue_after, snapshots_due_at
from gradientmail_core.events import RoundTakenOver
from gradientmail_core.mailbox import MeteredMailbox
from gradientmail_core.protocol.keys import ClaimKey, DeltaKey, HeadKey
from gradientmail_core.protocol.records import Claim, Estimates
from tests.core.engine.parts import SETTINGS, TIMEOUTS, Bench, Place, virtually

TIMED = Estimates(step=0.1, quorum=0.1, sync=0.1)


def bench(main: Any, settings: Any = SETTINGS) -> None:
    """Run a test with node ``b``, which follows node ``a``."""

    async def placed(place: Place) -> None:
        metered = MeteredMailbox(place.mailbox)
        found = await Bench.of(place, "b", settings, metered)
        found.live("a", "b")
        await main(found, metered)

    virtually(placed)


async def expecting(found: Bench, seconds: float, estimates: Estimates = TIMED) -> None:
    """A head whose next commit is expected in so many seconds."""
    found.chain.head = replace(found.chain.head, seen=found.host.clock.now(), interval=seconds, estimates=estimates)


def taken_over(found: Bench) -> list[str]:
    return [event.reason for event in found.place.events(RoundTakenOver)]


def order(found: Bench, *names: str) -> tuple[str, ...]:
    return rendezvous(found.run.id, 0, names)


# -- asking ------------------------------------------------------------------------------------------------


def test_nothing_is_asked_before_the_commit_is_due() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await expecting(found, 10.0)
        before = metered.usage
        await found.kept(9.9)
        assert metered.usage == before

    bench(main)


@pytest.mark.parametrize("late", [0.0, 0.3, 2.0])
def test_a_commit_is_found_soon_after_it_was_made_with_few_questions(late: float) -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await expecting(found, 10.0)
        before = metered.usage
        following = asyncio.ensure_future(found.advanced(within=20.0))
        await asyncio.sleep(9.99 + late)
        winner = await found.commit(node="a", closer="a")
        await following
        assert found.chain.head.digest == winner.digest
        assert found.place.loop.time() <= 10.0 + 2 * late + 0.5
        assert metered.usage.since(before).requests <= 10

    bench(main)


def test_a_round_that_is_predicted_far_too_early_is_asked_for_ever_more_rarely() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await expecting(found, 0.4)
        before = metered.usage
        await found.kept(4.0)
        assert metered.usage.since(before).requests <= 18  # every 0.1 s makes 38

    bench(main)


def test_once_this_node_has_published_a_late_commit_is_asked_for_closely_again() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await expecting(found, 0.4)
        following = asyncio.ensure_future(found.chain.run())
        await asyncio.sleep(8.0)
        before = metered.usage
        await asyncio.sleep(0.5)
        assert metered.usage.since(before).requests <= 2
        before = metered.usage
        found.publish()
        await asyncio.sleep(0.5)
        assert metered.usage.since(before).requests >= 4
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    bench(main)


def test_a_hint_at_the_open_round_is_followed_at_once() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await expecting(found, 100.0)
        winner = await found.commit(node="a")
        following = asyncio.ensure_future(found.advanced(within=5.0))
        await asyncio.sleep(1.0)
        found.board.listed([HeadKey(0, 2)])
        await following
        assert found.chain.head.digest == winner.digest
        assert found.place.loop.time() < 1.1

    bench(main)


def test_several_commits_are_caught_up_one_after_the_other() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        head = found.chain.head
        for fill in (1.0, 2.0, 3.0):
            newer = await found.commit(node="a", fill=fill, closer="a")
            found.chain.head = newer
        found.chain.head = head
        found.board.listed([HeadKey(0, 6)])
        await found.advanced(versions=3, within=1.0)
        assert found.chain.head.version == 3 and (found.chain.theta == 3.0).all()

    bench(main)


# -- publishing early --------------------------------------------------------------------------------------


def test_a_node_publishes_early_one_upload_before_the_round_will_close() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await expecting(found, 10.0)
        found.chain.uploaded(10.0)
        await found.kept(6.9)
        assert found.wishes == []
        await found.kept(0.2)
        assert set(found.wishes) == {True}

    bench(main)


def test_who_does_not_follow_or_has_published_is_not_hurried() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await expecting(found, 3.0)
        if found.run.settings.follow is None:
            found.publish()
        await found.kept(3.5)
        assert found.wishes == []

    bench(main, replace(SETTINGS, follow=False))
    bench(main)


def test_who_follows_two_others_publishes_early_once_both_have() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        found.live("a", "b", "c", "d")
        await expecting(found, 5.0)
        due = snapshots_due_at(found.chain.head, None) - found.host.clock.now()
        before = metered.usage
        await found.kept(due - 0.1)
        assert metered.usage == before
        await found.snapshot("c")
        await found.kept(0.7)
        assert found.wishes == [] and metered.usage.since(before).lists > 0
        await found.snapshot("d")
        await found.kept(2.0)
        assert set(found.wishes) == {True} and metered.usage.since(before).lists <= 5

    bench(main, replace(SETTINGS, follow=2))


@pytest.mark.parametrize("how", ["left", "leaves", "crashed"])
def test_the_snapshot_of_who_is_gone_hurries_nobody(how: str) -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        found.live("a", "b", "c", "d")
        await expecting(found, 10 * TIMEOUTS.lease)
        found.board.reported(found.chain.round, ["d"])
        if how != "crashed":
            found.live("d", state="x" if how == "left" else "d", beat=1)
        keeping = asyncio.ensure_future(beating(found, "a", "b", "c", "e"))
        await found.kept(TIMEOUTS.lease + 0.1)
        found.board.reported(found.chain.round, ["c"])
        await found.kept(1.0)
        assert found.wishes == []
        found.board.reported(found.chain.round, ["e"])
        await found.kept(1.0)
        assert set(found.wishes) == {True}, "two who live"
        keeping.cancel()

    bench(main, replace(SETTINGS, follow=2))


# -- taking over -------------------------------------------------------------------------------------------


def test_a_closer_that_left_is_replaced_at_once() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        found.publish()
        found.live("a", state="x", beat=1)
        await found.advanced(within=2.0)
        assert found.chain.head.record is not None and found.chain.head.record.node == "b"
        assert taken_over(found) == ["it left"]
        assert found.chain.head.closer == "b"

    bench(main)


def test_a_silent_closer_is_replaced_after_one_lease() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        found.publish()
        keeping = asyncio.ensure_future(beating(found, "b"))
        await found.advanced(within=TIMEOUTS.lease + 5.0)
        keeping.cancel()
        assert found.place.loop.time() >= TIMEOUTS.lease
        assert taken_over(found) == ["no sign of life"]

    bench(main)


async def beating(found: Bench, *nodes: str) -> None:
    for beat in range(1, 1000):
        found.live(*nodes, beat=beat)
        await found.host.clock.sleep(TIMEOUTS.period)


def test_a_closer_that_beats_and_does_not_close_is_replaced_once_a_quorum_waited_long() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await expecting(found, 2.0)
        found.publish()
        keeping = asyncio.ensure_future(beating(found, "a", "b"))
        patience = overdue_after(found.chain.head, TIMEOUTS.lease)
        await found.advanced(within=patience + 3.0)
        keeping.cancel()
        assert patience <= found.place.loop.time()
        assert taken_over(found) == ["the round is overdue"]

    bench(main)


def test_without_a_quorum_nobody_takes_over_from_a_live_closer() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await expecting(found, 2.0)
        found.publish()
        keeping = asyncio.ensure_future(beating(found, "a", "b"))
        await found.kept(5 * TIMEOUTS.lease)
        keeping.cancel()
        assert taken_over(found) == []

    bench(main, replace(SETTINGS, quorum_size=2))


@pytest.mark.parametrize("first", [True, False])
def test_candidates_wait_their_turn_in_rendezvous_order(first: bool) -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        other = next(name for name in map("n{}".format, range(50)) if (order(found, "b", name)[0] == "b") == first)
        found.live("b", other, beat=1)
        found.publish()
        found.live("a", state="x", beat=2)
        await found.kept(0.9)
        assert bool(taken_over(found)) == first
        if not first:
            await found.kept(0.2)
            assert taken_over(found) == ["it left"]

    bench(main)


def test_who_leaves_without_a_snapshot_takes_nothing_over() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        found.board.leaving = True
        found.live("a", state="x", beat=1)
        await found.kept(60.0)
        assert taken_over(found) == []

    bench(main)


# -- claims ------------------------------------------------------------------------------------------------


async def claim(found: Bench, number: int, node: str, incarnation: str = "0c") -> None:
    body = Claim(found.run.id, node, incarnation, "0f").encoded()
    await found.place.mailbox.create(ClaimKey(found.chain.round, number).path, body)


def test_a_standing_claim_is_respected_and_not_asked_about_all_the_time() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await claim(found, 0, "c")
        found.publish()
        found.live("a", state="x", beat=1)
        keeping = asyncio.ensure_future(beating(found, "b", "c"))
        before = metered.usage
        await found.kept(60.0)
        keeping.cancel()
        assert taken_over(found) == []
        assert metered.usage.since(before).requests < 4 * 60

    bench(main)


def test_a_claim_whose_holder_died_lapses_after_one_lease() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await claim(found, 0, "c")
        found.publish()
        found.live("c")
        found.live("a", state="x", beat=1)
        keeping = asyncio.ensure_future(beating(found, "b"))
        await found.advanced(within=TIMEOUTS.lease + 5.0)
        keeping.cancel()
        assert found.place.loop.time() >= TIMEOUTS.lease - 1
        assert ClaimKey(2, 1).path not in found.place.listed("live/claims/"), "swept with the round"
        assert found.chain.head.record is not None and found.chain.head.record.node == "b"

    bench(main)


@pytest.mark.parametrize("spent", ["garbage", "another run", "former self"])
def test_claims_that_bind_nobody_are_passed(spent: str) -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        key = ClaimKey(found.chain.round, 0).path
        match spent:
            case "garbage":
                await found.place.mailbox.create(key, b"garbage")
            case "another run":
                await found.place.mailbox.create(key, Claim("ff", "c", "0c", "0f").encoded())
            case _:
                await claim(found, 0, "b", incarnation="dead")
        found.publish()
        found.live("a", state="x", beat=1)
        await found.advanced(within=2.0)
        assert taken_over(found) == ["it left"]

    bench(main)


def test_after_winning_a_claim_a_commit_that_is_already_there_is_adopted() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        await expecting(found, 100.0)
        winner = await found.commit(node="a", closer="c")
        found.publish()
        found.live("a", state="x", beat=1)
        found.live("c")
        await found.advanced(within=2.0)
        assert found.chain.head.digest == winner.digest
        assert taken_over(found) == []

    bench(main)


def test_a_closer_that_was_only_slow_is_not_harmed() -> None:
    async def main(found: Bench, metered: MeteredMailbox) -> None:
        slow = Bench(found.place, found.place.host("a"), found.run, found.loaded)
        for each in (found, slow):
            each.live("a", "b")
        found.publish()
        found.live("a", state="x", beat=1)
        await found.advanced()
        slow.publish()
        await slow.advanced()
        assert slow.chain.head.digest == found.chain.head.digest
        assert (slow.chain.theta == found.chain.theta).all()
        assert DeltaKey(2, "b").path not in found.place.listed("live/deltas/")

    bench(main)
