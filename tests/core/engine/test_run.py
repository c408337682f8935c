"""The board only grows more certain: listings add what was seen, and nothing missing takes a fact back."""

import asyncio
from typing import Any

import pytest

from gradientmail_core.engine.election import rendezvous
from gradientmail_core.engine.run import STRAYS_REMEMBERED, Bell, Board
from gradientmail_core.events import NodeAppeared, NodeGone, ObjectIgnored
from gradientmail_core.protocol.keys import ClaimKey, DeltaKey, HeadKey, LeaseKey, LeaseState
from tests.core.engine.parts import TIMEOUTS, Place, run_of, virtually


def lease(node: str, beat: int = 0, state: LeaseState = "t", step: int = 0, tag: str = "0" * 16) -> LeaseKey:
    return LeaseKey(node, beat, state, step, tag)


def on_board(main: Any) -> None:
    """Run a test with the board of node ``a``, whose fragments 0 and 1 have rounds 4 and 7 open."""

    async def placed(place: Place) -> None:
        board = Board(place.host("a"), open_rounds={0: 4, 1: 7})
        await main(place, board)

    virtually(placed)


def test_a_listing_tells_who_lives_what_is_published_and_what_is_claimed() -> None:
    async def main(place: Place, board: Board) -> None:
        board.listed(
            [lease("b"), lease("c", state="e"), DeltaKey(4, "b"), DeltaKey(4, "c"), ClaimKey(4, 2), HeadKey(1, 5)]
        )
        assert board.live_learners() == ("b",)
        assert board.live_closers() == ("b", "c")
        assert board.deltas[4] == {"b", "c"} and board.claims[4] == {2}
        assert board.hints == {1: 5} and board.heads == [HeadKey(1, 5)]

    on_board(main)


def test_what_a_listing_lacks_is_not_taken_back() -> None:
    async def main(place: Place, board: Board) -> None:
        board.listed([lease("b"), DeltaKey(4, "b"), ClaimKey(4, 0), HeadKey(1, 5)])
        board.listed([HeadKey(1, 3)])
        assert board.live_learners() == ("b",)
        assert board.deltas[4] == {"b"} and board.claims[4] == {0} and board.hints == {1: 5}

    on_board(main)


def test_a_new_snapshot_of_an_open_round_is_a_sign_of_life_once() -> None:
    async def main(place: Place, board: Board) -> None:
        board.listed([lease("b")])
        for _ in range(2):
            await board.host.clock.sleep(TIMEOUTS.lease - 1)
            board.listed([lease("b"), DeltaKey(4, "b")])
        assert board.live_learners() == ("b",)
        await board.host.clock.sleep(2)
        board.listed([lease("b"), DeltaKey(4, "b")])
        assert board.live_learners() == ()

    on_board(main)


def test_a_snapshot_that_is_merged_long_after_it_was_seen_is_no_second_sign_of_life() -> None:
    async def main(place: Place, board: Board) -> None:
        board.listed([lease("b"), DeltaKey(4, "b")])
        await board.host.clock.sleep(TIMEOUTS.lease - 1)
        board.reported(4, ["b"])
        await board.host.clock.sleep(2)
        assert board.live_learners() == ()
        board.reported(6, ["b"])
        assert board.live_learners() == ("b",)

    on_board(main)


def test_a_snapshot_left_over_from_a_closed_round_is_no_sign_of_life() -> None:
    async def main(place: Place, board: Board) -> None:
        board.listed([lease("b")])
        await board.host.clock.sleep(TIMEOUTS.lease + 1)
        board.listed([lease("b"), DeltaKey(2, "b"), DeltaKey(5, "b")])
        assert board.live_learners() == ()
        assert board.closed_rounds(0) == [2] and board.closed_rounds(1) == [5]

    on_board(main)


@pytest.mark.parametrize(
    ("round", "is_open"), [(2, False), (3, False), (4, True), (5, False), (6, True), (7, True), (9, True)]
)
def test_rounds_are_open_from_their_own_fragments_newest_on(round: int, is_open: bool) -> None:
    async def main(place: Place, board: Board) -> None:
        assert board.is_open(round) == is_open
        assert not Board(board.host).is_open(round), "nothing is known before the run is joined"

    on_board(main)


def test_forgotten_rounds_are_seen_again_if_they_are_listed_again() -> None:
    async def main(place: Place, board: Board) -> None:
        board.listed([DeltaKey(2, "b"), ClaimKey(2, 0)])
        board.forget(2)
        assert board.closed_rounds(0) == []
        board.listed([ClaimKey(2, 0)])
        assert board.closed_rounds(0) == [2]

    on_board(main)


def test_a_listing_stands_for_earlier_ones_where_rounds_are_closed() -> None:
    """Else they would add up in a node that never closes."""

    async def main(place: Place, board: Board) -> None:
        board.listed([DeltaKey(2, "b"), ClaimKey(2, 0), DeltaKey(4, "b")])
        board.listed([DeltaKey(5, "b")])
        assert board.closed_rounds(0) == [] and board.closed_rounds(1) == [5]
        assert board.deltas[4] == {"b"}, "of open ones all that was seen"

    on_board(main)


@pytest.mark.parametrize(("state", "reason"), [("t", None), ("d", None), ("x", "it left")])
def test_why_a_node_is_not_waited_for(state: LeaseState, reason: str | None) -> None:
    async def main(place: Place, board: Board) -> None:
        board.listed([lease("b", state=state)])
        assert board.gone("b", 0.0) == reason
        await board.host.clock.sleep(TIMEOUTS.lease)
        assert board.gone("b", 0.0) == (reason or "no sign of life")

    on_board(main)


def test_a_node_never_seen_is_silent_since_it_should_have_been() -> None:
    async def main(place: Place, board: Board) -> None:
        since = board.host.clock.now()
        await board.host.clock.sleep(TIMEOUTS.lease - 1)
        assert board.gone("ghost", since) is None
        await board.host.clock.sleep(1)
        assert board.gone("ghost", since) == "no sign of life"

    on_board(main)


def test_coming_and_going_is_told_once_each_and_never_of_oneself() -> None:
    async def main(place: Place, board: Board) -> None:
        board.own_beat(lease("a"))
        board.listed([lease("a"), lease("b"), lease("c")])
        board.listed([lease("b", 1), lease("c", 1, "x")])
        await board.host.clock.sleep(TIMEOUTS.lease)
        board.listed([])
        board.listed([lease("b", 2)])
        assert [event for _, event in place.log] == [
            NodeAppeared("b"),
            NodeAppeared("c"),
            NodeGone("c", left=True),
            NodeGone("b", left=False),
            NodeAppeared("b"),
        ]

    on_board(main)


def test_own_beats_count_without_a_listing() -> None:
    async def main(place: Place, board: Board) -> None:
        board.own_beat(lease("a"))
        assert board.live_learners() == ("a",)

    on_board(main)


def test_a_joiner_is_noticed() -> None:
    async def main(place: Place, board: Board) -> None:
        board.listed([])
        assert not board.joining()
        board.listed([lease("z", state="j")])
        assert board.joining()

    on_board(main)


def test_who_has_not_listed_for_long_cannot_tell_that_nobody_joins() -> None:
    async def main(place: Place, board: Board) -> None:
        assert board.joining()
        board.listed([])
        await board.host.clock.sleep(board.host.timeouts.lease / 2 + 1)
        assert board.joining()
        board.listed([])
        assert not board.joining()

    on_board(main)


def test_candidates_are_the_live_closers_in_rendezvous_order() -> None:
    async def main(place: Place, board: Board) -> None:
        board.listed([lease(node) for node in "bcd"] + [lease("e", state="d")])
        run = run_of()
        assert board.candidates(run, 1) == rendezvous(run.id, 1, ["b", "c", "d"])

    on_board(main)


def test_strange_objects_are_reported_once_and_not_without_end() -> None:
    async def main(place: Place, board: Board) -> None:
        for _ in range(2):
            board.ignored("live/" + "x" * 500, "no key")
        assert [event for _, event in place.log] == [ObjectIgnored(("live/" + "x" * 500)[:200], "no key")]
        for number in range(STRAYS_REMEMBERED + 5):
            board.ignored(f"live/{number}", "no key")
        assert len(place.log) == STRAYS_REMEMBERED

    on_board(main)


def test_a_listing_wakes_every_fragment() -> None:
    async def main(place: Place, board: Board) -> None:
        board.bells.update({0: Bell(), 1: Bell()})
        waits = asyncio.gather(*(bell.wait(board.host.clock, 100.0) for bell in board.bells.values()))
        await board.host.clock.sleep(1.0)
        board.listed([])
        await waits
        assert place.loop.time() == 1.0

    on_board(main)


def test_a_bell_wakes_one_wait_early_and_then_is_silent() -> None:
    async def main(place: Place, board: Board) -> None:
        bell, clock = Bell(), board.host.clock
        bell.ring()
        await bell.wait(clock, 5.0)
        assert place.loop.time() == 0.0
        await bell.wait(clock, 5.0)
        assert place.loop.time() == 5.0
        place.loop.call_later(1.0, bell.ring)
        await bell.wait(clock, 5.0)
        assert place.loop.time() == 6.0

    on_board(main)


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async def main(place: Place, board: Board) -> None:
        waiting = asyncio.ensure_future(Bell().wait(board.host.clock, 5.0))
        await board.host.clock.sleep(1.0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await board.host.clock.sleep(0.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    on_board(main)


def test_jitter_stays_within_a_tenth() -> None:
    async def main(place: Place, board: Board) -> None:
        drawn = [board.host.jitter(10.0) for _ in range(200)]
        assert 9.0 <= min(drawn) < 9.5 and 10.5 < max(drawn) <= 11.0

    on_board(main)


def test_a_run_is_known_by_its_manifest() -> None:
    run = run_of()
    assert (run.id, run.fragments) == (run.manifest.run, 2)
