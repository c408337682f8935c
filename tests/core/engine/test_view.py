"""What a node knows of a chain, and how nodes that wait for each other are freed."""

from dataclasses import replace
from typing import Any

import pytest

from gradientmail_core.engine.learner import Overdue, Wanted
from gradientmail_core.engine.polling import overdue_after
from gradientmail_core.protocol.keys import DeltaKey, HeadKey
from gradientmail_core.protocol.records import Estimates
from tests.core.engine.parts import SETTINGS, TIMEOUTS, Bench, Place, virtually


def bench(main: Any, node: str = "a", settings: Any = SETTINGS) -> None:
    async def placed(place: Place) -> None:
        await main(await Bench.of(place, node, settings))

    virtually(placed)


def timed(found: Bench) -> float:
    """Give the head a timed closing; seconds until its round is overdue."""
    found.chain.head = replace(found.chain.head, estimates=Estimates(step=0.1, quorum=0.1, sync=0.1))
    return overdue_after(found.chain.head, TIMEOUTS.lease)


def test_a_view_announces_its_closer_and_open_round() -> None:
    async def main(found: Bench) -> None:
        assert found.board.closers[0] == "a" and found.board.open_rounds[0] == found.chain.round == 2
        found.live("a")
        found.publish()
        await found.advanced()
        assert found.board.open_rounds[0] == found.chain.round == 4

    bench(main)


@pytest.mark.parametrize(("node", "closing"), [("a", True), ("b", False)])
def test_the_named_closer_closes(node: str, closing: bool) -> None:
    async def main(found: Bench) -> None:
        assert found.chain.closing == closing
        assert not found.chain.settling

    bench(main, node)


def test_a_closer_settles_while_it_holds_others_snapshots() -> None:
    async def main(found: Bench) -> None:
        found.live("a", "b", "c")
        found.publish()
        await found.kept(0.5)
        assert found.chain.settling
        await found.advanced()
        assert not found.chain.settling

    bench(main, settings=replace(SETTINGS, grace_seconds=5.0))


@pytest.mark.parametrize(
    ("quorum", "nodes", "needed"), [(1, "a", 1), (2, "a", 1), (2, "ab", 2), (2, "abc", 2), (3, "", 1)]
)
def test_a_quorum_is_never_more_than_there_are_learners(quorum: int, nodes: str, needed: int) -> None:
    async def main(found: Bench) -> None:
        found.live(*nodes)
        assert found.chain._needed() == needed

    bench(main, settings=replace(SETTINGS, quorum_size=quorum))


def test_who_has_reported_and_leaves_counts_for_the_quorum() -> None:
    async def main(found: Bench) -> None:
        found.live("a", state="d")
        found.live("b")
        assert found.chain._needed() == 1
        found.board.listed([DeltaKey(2, "a")])
        assert found.chain._needed() == 2

    bench(main, settings=replace(SETTINGS, quorum_size=2))


def test_upload_times_are_smoothed() -> None:
    async def main(found: Bench) -> None:
        for _ in range(50):
            found.chain.uploaded(4.0)
        assert found.chain._upload_seconds == pytest.approx(4.0)
        found.chain.uploaded(14.0)
        assert found.chain._upload_seconds == pytest.approx(7.0)

    bench(main)


def test_a_round_that_takes_too_long_frees_its_place_once() -> None:
    async def main(found: Bench) -> None:
        found.publish()
        patience = timed(found)
        found.chain._unlock(found.host.clock.now() + patience - 0.1)
        assert found.messages == []
        for _ in range(2):
            found.chain._unlock(found.host.clock.now() + patience)
        assert found.messages == [Overdue(0)] and found.board.overdue == {0}

    bench(main)


def test_who_waits_reports_on_what_others_wait_for() -> None:
    async def main(found: Bench) -> None:
        found.board.listed([DeltaKey(2, "b")])
        found.chain._unlock(found.host.clock.now())
        assert found.messages == [], "nothing of this node's own is overdue"
        found.board.overdue.add(1)
        for _ in range(2):
            found.chain._unlock(found.host.clock.now())
        assert found.messages == [Wanted(0)]

    bench(main)


@pytest.mark.parametrize("others", [[], [DeltaKey(2, "a")], [DeltaKey(4, "b")], [DeltaKey(3, "b")]])
def test_nobody_is_asked_to_report_where_nobody_waits(others: list[DeltaKey]) -> None:
    async def main(found: Bench) -> None:
        found.board.overdue.add(1)
        found.board.listed(others)
        found.chain._unlock(found.host.clock.now())
        assert found.messages == []

    bench(main)


def test_who_has_reported_is_not_asked_again() -> None:
    async def main(found: Bench) -> None:
        found.publish()
        found.board.overdue.add(1)
        found.board.listed([DeltaKey(2, "b")])
        found.chain._unlock(found.host.clock.now())
        assert found.messages == []

    bench(main)


@pytest.mark.parametrize(("node", "left"), [("a", [HeadKey(0, 2).path]), ("b", [])])
def test_a_leaving_closer_leaves_a_hint(node: str, left: list[str]) -> None:
    async def main(found: Bench) -> None:
        found.chain.head = await found.commit(node="a", closer="a")
        await found.chain.hint()
        assert found.place.listed("live/heads/") == left

    bench(main, node)


@pytest.mark.parametrize(("node", "left"), [("a", 0), ("b", 1)])
def test_only_the_closer_tidies(node: str, left: int) -> None:
    async def main(found: Bench) -> None:
        await found.snapshot("c")
        found.board.listed([DeltaKey(2, "c")])
        found.chain.head = await found.commit(node="a", closer="a")
        found.chain._announce()
        await found.chain.tidy()
        assert len(found.place.listed("live/deltas/")) == left

    bench(main, node)


def test_who_commits_removes_what_the_last_listing_showed_though_it_did_not_close_then() -> None:
    """Found by seed 408: closers took turns, and each had forgotten what the one before the last left and died."""

    async def main(found: Bench) -> None:
        await found.snapshot("c")
        found.board.listed([DeltaKey(2, "c")])
        found.chain.head = await found.commit(node="a", closer="a")
        found.chain._announce()
        await found.chain.tidy()
        await found.chain._sweeper.committed(found.chain.head, [])
        assert found.place.listed("live/deltas/") == []

    bench(main, "b")
