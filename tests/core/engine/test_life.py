"""The common part of every node's life: its tasks end together, and a lasting fault is told once."""

import asyncio

from gradientmail_core.engine.life import Life
from gradientmail_core.engine.run import Board
from gradientmail_core.events import SessionEnded
from gradientmail_core.protocol.keys import LeaseState
from tests.core.engine.parts import Place, virtually


class Quiet(Life):
    beats = ""
    rounds_seen = 3  # type: ignore[assignment]  # a plain number does here

    async def _beat(self, state: LeaseState | None = None) -> None:
        self.beats += state or "-"
        if state == "x" and self.beats.startswith("e"):
            await asyncio.sleep(1e6)


def quiet(place: Place) -> Quiet:
    host = place.host("a")
    return Quiet(host, Board(host))


async def failing(after: float) -> None:
    await asyncio.sleep(after)
    raise OSError(f"after {after}")


def test_the_first_failure_is_kept_and_told_once_and_the_others_go_on() -> None:
    async def main(place: Place) -> None:
        life, told = quiet(place), list[BaseException]()
        life._on_failure = told.append
        for after in (2.0, 1.0):
            life.accompany(failing(after))
        waiting = life._spawn(asyncio.sleep(1e6))
        await asyncio.sleep(5.0)
        assert [str(failure) for failure in told] == ["after 1.0"] and life.failure is told[0] and not waiting.done()
        await life.stop()
        assert waiting.cancelled() and not life._tasks

    virtually(main)


def test_an_abort_stops_releases_the_lease_and_does_not_wait_long_for_that() -> None:
    async def main(place: Place) -> None:
        prompt, stuck = quiet(place), quiet(place)
        stuck.pause()
        await asyncio.sleep(0)
        for life in (prompt, stuck):
            await life.abort("enough")
        assert prompt.beats == "x" and stuck.beats == "ex" and place.loop.time() < 5.0
        assert place.events(SessionEnded) == [SessionEnded("a", 3, "enough")] * 2

    virtually(main)
