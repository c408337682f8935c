"""A node's own beats: growing, removed once replaced, ahead of whatever an older process of its name left."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gradientmail_core.engine.lease import BEATS_LEFT_MOST, Lease
from gradientmail_core.engine.run import Board
from gradientmail_core.errors import RunMismatch
from gradientmail_core.protocol.keys import LIVE, LeaseKey, LiveKey, parse_live
from tests.core.engine.parts import Place, virtually

OLDER = "0b" * 8


def with_lease(main: Callable[[Place, Board, Lease], Awaitable[None]]) -> None:
    async def placed(place: Place) -> None:
        board = Board(place.host("a"))
        await main(place, board, Lease(board, lambda: 7))

    virtually(placed)


def listed(place: Place) -> list[LiveKey]:
    return [key for path in place.listed(LIVE) if (key := parse_live(path)) is not None]


def numbers(place: Place) -> list[int]:
    return [key.beat for key in listed(place) if isinstance(key, LeaseKey)]


def test_beats_grow_from_the_highest_found_and_the_last_two_stay() -> None:
    async def main(place: Place, board: Board, lease: Lease) -> None:
        old = [LeaseKey("a", beat, "t", 3, OLDER) for beat in (5, 4)]
        for key in old:
            await place.mailbox.put(key.path, b"{}")
        lease.continued([*old, LeaseKey("b", 99, "t", 3, OLDER)])
        await lease.beat("j")
        assert numbers(place) == [5, 6]
        await lease.beat("t")
        assert numbers(place) == [6, 7] and lease.newest == LeaseKey("a", 7, "t", 7, board.host.incarnation)

    with_lease(main)


def test_what_a_dead_process_left_is_passed_and_one_that_comes_past_again_lives() -> None:
    async def main(place: Place, board: Board, lease: Lease) -> None:
        await lease.beat("j")
        late = LeaseKey("a", 3, "t", 9, OLDER)
        assert lease.passed([late]) and not lease.passed([late])
        await lease.beat("t")
        assert lease.newest.beat == 3 + BEATS_LEFT_MOST
        assert not lease.passed([LeaseKey("a", 90, "x", 9, "0c" * 8)]), "it has left"
        with pytest.raises(RunMismatch, match="Another process runs as node 'a'"):
            lease.passed([LeaseKey("a", 9, "t", 9, OLDER)])

    with_lease(main)


def test_a_beat_that_landed_after_it_was_replaced_does_not_stay() -> None:
    async def main(place: Place, board: Board, lease: Lease) -> None:
        for _ in range(4):
            await lease.beat("t")
        await place.mailbox.put(LeaseKey("a", 1, "t", 7, board.host.incarnation).path, b"{}")
        board.listed(listed(place))
        await lease.drop_late()
        assert numbers(place) == [2, 3]

    with_lease(main)


def test_a_beat_that_landed_although_it_was_interrupted_goes_when_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(place: Place, board: Board, lease: Lease) -> None:
        put = place.mailbox.put

        async def interrupted(key: str, body: bytes) -> None:
            await put(key, body)
            raise asyncio.CancelledError

        await lease.beat("j")
        with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
            patch.setattr(place.mailbox, "put", interrupted)
            await lease.beat("j")
        await lease.beat("t")
        board.listed(listed(place))
        await lease.drop_late()
        assert numbers(place) == [1, 2]
        await lease.beat("t")
        assert numbers(place) == [2, 3]

    with_lease(main)
