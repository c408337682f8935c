"""Going on: whoever committed, a node's head, parameters and verdict are those of the first record in the tape."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.engine.learner import Commit
from gradientmail_core.engine.ledger import UNKNOWN
from gradientmail_core.events import ObjectIgnored, SnapshotRefused
from gradientmail_core.mailbox import MeteredMailbox
from gradientmail_core.protocol import records
from gradientmail_core.protocol.exchange import written
from gradientmail_core.protocol.records import Participant, Refusal
from gradientmail_core.sim.checks import tape
from tests.core.engine.parts import (
    INCARNATION,
    SETTINGS,
    Bench,
    Place,
    committed,
    first_head,
    record_after,
    virtually,
)


def bench(main: Any, node: str = "b", settings: Any = SETTINGS) -> None:
    """Run a test with node ``b``, which follows node ``a``, or with another."""

    async def placed(place: Place) -> None:
        found = await Bench.of(place, node, settings, MeteredMailbox(place.mailbox))
        found.live("a", "b")
        await main(found)

    virtually(placed)


def delivered(found: Bench) -> list[Commit]:
    return [message for message in found.messages if isinstance(message, Commit)]


def test_a_commit_reaches_the_learner_with_its_parameters() -> None:
    async def main(found: Bench) -> None:
        head = await found.commit(node="a", fill=3.0, closer="c", newest_step=17)
        assert await found.chain.caught_up()
        (commit,) = delivered(found)
        assert commit.head.digest == head.digest and (commit.theta == 3.0).all()
        assert not commit.merged and commit.refusal is None
        assert found.board.closers[0] == "c" and found.board.newest_step == 17
        assert found.wishes == [False], "nothing has to be hurried any more"
        assert not await found.chain.caught_up()

    bench(main)


def test_a_merged_snapshot_is_recognised_by_its_digest() -> None:
    async def main(found: Bench) -> None:
        mine = found.publish()
        others = Participant("b", INCARNATION, "9" * 64, 1, 1, 0.5)
        await found.commit(participants=(others, replace(others, snapshot=mine)))
        await found.chain.caught_up()
        assert delivered(found)[0].merged
        assert found.place.events(SnapshotRefused) == []

    bench(main)


@pytest.mark.parametrize(
    ("refusals", "told", "reason"),
    [
        ((), None, "the round closed before it arrived"),
        (("outlier",), "outlier", "outlier"),
        (("nonfinite",), "nonfinite", "nonfinite"),
    ],
)
def test_a_snapshot_that_was_not_merged_is_told_why(refusals: tuple[Any, ...], told: str | None, reason: str) -> None:
    async def main(found: Bench) -> None:
        mine = found.publish()
        named = tuple(Refusal("b", INCARNATION, mine, refusal) for refusal in refusals)
        await found.commit(participants=(Participant("b", INCARNATION, "9" * 64, 1, 1, 1.0),), refusals=named)
        await found.chain.caught_up()
        assert (delivered(found)[0].merged, delivered(found)[0].refusal) == (False, told)
        assert [event.reason for event in found.place.events(SnapshotRefused)] == [reason]

    bench(main)


def test_a_round_without_a_snapshot_of_ours_says_nothing_of_it() -> None:
    async def main(found: Bench) -> None:
        await found.commit(refusals=(Refusal("b", INCARNATION, "9" * 64, "stale"),))
        await found.chain.caught_up()
        assert (delivered(found)[0].merged, delivered(found)[0].refusal) == (False, None)
        assert found.place.events(SnapshotRefused) == []

    bench(main)


def test_a_snapshot_whose_encoding_outlasts_its_round_is_told_once() -> None:
    async def main(found: Bench) -> None:
        found.chain.taken = mine = found.chain.round
        for _ in range(2):
            await found.commit(participants=(Participant("b", INCARNATION, "9" * 64, 1, 1, 1.0),))
            await found.chain.caught_up()
        told = found.place.events(SnapshotRefused)
        assert [(event.round, event.reason) for event in told] == [(mine, "stale")]

    bench(main)


def test_a_void_round_moves_the_head_and_fetches_no_parameters() -> None:
    async def main(found: Bench) -> None:
        before, theta = found.chain.head, found.chain.theta
        metered: Any = found.host.mailbox
        await found.commit(nodes=(), sections=before.sections)
        used = metered.usage
        await found.chain.caught_up()
        assert metered.usage.since(used).gets == 1
        assert found.chain.head.version == 1 and found.chain.theta is theta
        assert delivered(found)[0].theta is theta

    bench(main)


def test_who_took_part_or_closed_is_alive() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b", "c", beat=1)
        await found.host.clock.sleep(11.0)
        await found.commit(nodes=("a",))
        await found.chain.caught_up()
        await found.host.clock.sleep(2.0)
        assert found.board.live_learners() == ("a", "b")

    bench(main)


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_parameters_that_cannot_be_read_are_waited_past(damage: str) -> None:
    async def main(found: Bench) -> None:
        head = await found.commit(fill=3.0)
        section = head.section("theta")
        assert section is not None
        await found.place.mailbox.delete(section.key)
        if damage == "corrupt":
            await found.place.mailbox.put(section.key, b"garbage")
        advancing = asyncio.ensure_future(found.chain.caught_up())
        await asyncio.sleep(5.0)
        assert delivered(found) == [] and not advancing.done()
        assert [event.key for event in found.place.events(ObjectIgnored)] == [section.key]
        open_head, found.chain.head = found.chain.head, head
        newest = await found.commit(fill=4.0)
        found.chain.head = open_head
        await advancing
        assert found.chain.head.digest == newest.digest and found.chain.head.version == 2
        assert [(commit.head.version, float(commit.theta[0])) for commit in delivered(found)] == [(2, 4.0)]

    bench(main)


def test_a_payload_that_comes_back_is_taken() -> None:
    async def main(found: Bench) -> None:
        head = await found.commit(fill=3.0)
        section = head.section("theta")
        assert section is not None
        body = await found.place.mailbox.get(section.key) or b""
        await found.place.mailbox.delete(section.key)
        advancing = asyncio.ensure_future(found.chain.caught_up())
        await asyncio.sleep(3.0)
        await found.place.mailbox.put(section.key, body)
        await advancing
        assert (found.chain.theta == 3.0).all()

    bench(main)


def test_closing_passes_from_node_to_node_as_records_say() -> None:
    async def placed(place: Place) -> None:
        first = await Bench.of(place, "a")
        second = Bench(place, place.host("b"), first.run, first.loaded)
        benches = (first, second)
        tasks = [asyncio.ensure_future(found.chain.run()) for found in benches]
        for closer in ("a", "b", "a"):
            for found in benches:
                found.live("a", "b")
                found.publish(1.0)
                body = found.chain.published.body if found.chain.published else b""
                await place.mailbox.put(f"live/deltas/{found.chain.round:010d}/{found.host.node}", body)
                # Both fragments count as this node's, so that it hands this one over.
                found.board.closers[1] = closer
            assert [found.chain.closing for found in benches] == [found.host.node == closer for found in benches]
            await asyncio.sleep(15.0)
        assert first.chain.head.digest == second.chain.head.digest and first.chain.head.version == 3
        assert np.array_equal(first.chain.theta, second.chain.theta)
        assert first.chain.head.record is not None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    virtually(placed)


# -- error feedback ----------------------------------------------------------------------------------------

FEEDBACK = replace(SETTINGS, delta_codec="INT2", error_feedback=True)
UNEVEN = np.linspace(-1.0, 1.0, 64, dtype=np.float32)


def residual(found: Bench) -> Any:
    assert found.chain.feedback is not None and found.chain.feedback.pending is None
    return found.chain.feedback.settled.values


@pytest.mark.parametrize(
    ("ending", "left"),
    [("merged", True), ("missed", False), ("stale", False), ("nonfinite", None), ("outlier", None), ("skipped", None)],
)
def test_the_residual_follows_what_became_of_the_snapshot(ending: str, left: bool | None) -> None:
    async def main(found: Bench) -> None:
        first = found.publish(UNEVEN)
        participant = Participant("b", INCARNATION, first, 20, 160, 1.0)
        await found.commit(participants=(participant,))
        await found.chain.caught_up()
        before = residual(found)
        assert before is not None and np.abs(before).max() > 0.05
        second = found.publish(UNEVEN * 2.0)
        pending = found.chain.feedback.pending.residual.values  # type: ignore[union-attr]  # it is pending
        refusals = (Refusal("b", INCARNATION, second, ending),) if ending in ("stale", "nonfinite", "outlier") else ()  # type: ignore[arg-type]  # one of these reasons
        merged = (replace(participant, snapshot=second),) if ending in ("merged", "skipped") else ()
        head = await found.commit(participants=merged, refusals=refusals)
        if ending == "skipped":
            await found.place.mailbox.delete(head.sections[0].key)
            await committed(found.others["b"], found.run, head, 9.0)
        assert await found.chain.caught_up()
        expected = {True: pending, False: before, None: None}[left]
        assert residual(found) is expected

    bench(main, settings=FEEDBACK)


def test_a_rollback_forgets_the_residuals_of_every_fragment() -> None:
    async def main(found: Bench) -> None:
        mine = found.publish(UNEVEN)
        await found.commit(participants=(Participant("b", INCARNATION, mine, 20, 160, 1.0),))
        await found.chain.caught_up()
        assert residual(found) is not None
        found.board.rollbacks += 1
        assert residual(found) is None

    bench(main, settings=FEEDBACK)


def test_a_refusal_for_its_values_is_a_rollback() -> None:
    async def main(found: Bench) -> None:
        mine = found.publish(UNEVEN)
        await found.commit(participants=(), refusals=(Refusal("b", INCARNATION, mine, "nonfinite"),))
        await found.chain.caught_up()
        assert found.board.rollbacks == 1

    bench(main)


def test_a_round_of_a_crowd_is_closed_and_followed_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one participant only, the closer lists all in a roll, and a follower finds itself there."""
    monkeypatch.setattr(records, "LISTED_MOST", 1)

    async def main(place: Place) -> None:
        settings = replace(SETTINGS, quorum_size=3)
        nodes = [place.launch(name, settings=settings, steps=120, min_nodes=3) for name in "abc"]
        await asyncio.gather(*(node.task for node in nodes if node.task is not None))
        last = await tape(place.mailbox)
        assert any(record.roll is not None and record.headcount == 3 for record in last)
        for node in nodes:
            assert node.learner is not None
            (first, second) = node.learner.books
            assert first.balanced and second.balanced and first.merged + second.merged > 100 * 8
        rolls = [key for key in place.listed("blobs/") if key.endswith(".json")]
        assert len(rolls) <= 2 * 3, "they are swept with the payloads of their version"

    virtually(main)


def test_where_the_roll_is_lost_nothing_is_claimed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LISTED_MOST", 1)

    async def main(found: Bench) -> None:
        mine = found.publish()
        others = Participant("b", INCARNATION, "9" * 64, 1, 1, 0.5)
        head = first_head(found.run)
        record = record_after(head, found.run, participants=(others, replace(others, snapshot=mine)))
        short = await written(found.place.mailbox, record)
        assert short.roll is not None
        await found.place.mailbox.delete(short.roll.key)
        await found.commit(participants=short.participants, others=1, roll=short.roll)
        await found.chain.caught_up()
        (commit,) = delivered(found)
        assert not commit.merged and commit.refusal == UNKNOWN

    bench(main)
