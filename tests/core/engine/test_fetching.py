"""Which snapshots a closer asks for, and by what requests."""

import asyncio

import pytest

from gradientmail_core.engine.fetching import DOWNLOADS_AT_ONCE, LISTED_FROM, LISTING, Fetches, asked_for
from gradientmail_core.sim.loop import VirtualLoop, run_virtually

NODES = [f"n{number:02d}" for number in range(40)]


def test_a_few_missing_are_asked_for_one_by_one() -> None:
    few = NODES[: LISTED_FROM - 1]
    assert asked_for(set(few), ()) == (few, False)


def test_from_twelve_on_a_listing_is_asked_for_and_only_what_is_known_to_be_there() -> None:
    assert asked_for(set(NODES[:LISTED_FROM]), ()) == ([], True)
    assert asked_for(set(NODES), {"n01", "n00"}) == (["n00", "n01"], True)


def test_many_that_are_known_to_be_there_need_no_listing() -> None:
    seen = set(NODES[5:])
    assert asked_for(set(NODES), seen) == (NODES, False)


def virtually(main: object) -> None:
    async def run(loop: VirtualLoop) -> None:
        await main()  # type: ignore[operator]  # a coroutine function without arguments

    run_virtually(run)


def test_a_request_is_made_once_at_a_time() -> None:
    async def main() -> None:
        fetches, answered = Fetches(), asyncio.Event()

        async def ask() -> None:
            await answered.wait()

        assert fetches.idle("a") and "a" not in fetches
        fetches.begin("a", ask())
        assert not fetches.idle("a") and "a" in fetches and list(fetches.running()) == ["a"]
        answered.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert fetches.idle("a") and "a" in fetches and not fetches.running()

    virtually(main)


def test_the_error_of_a_request_is_raised_to_who_would_ask_again() -> None:
    async def main() -> None:
        fetches = Fetches()

        async def fails() -> None:
            raise RuntimeError("broken")

        fetches.begin(LISTING, fails())
        await asyncio.sleep(0.1)
        with pytest.raises(RuntimeError, match="broken"):
            fetches.idle(LISTING)

    virtually(main)


def test_what_is_abandoned_ends() -> None:
    async def main() -> None:
        fetches = Fetches()
        fetches.begin("a", asyncio.sleep(1e9))
        fetches.abandon()
        await asyncio.sleep(0.1)
        assert not fetches.running()

    virtually(main)


def test_only_so_many_downloads_run_at_once() -> None:
    async def main() -> None:
        fetches, most, now = Fetches(), 0, 0

        async def download() -> None:
            nonlocal most, now
            async with fetches.lines:
                now += 1
                most = max(most, now)
                await asyncio.sleep(1.0)
                now -= 1

        for node in NODES:
            fetches.begin(node, download())
        await asyncio.sleep(10.0)
        assert most == DOWNLOADS_AT_ONCE and not fetches.running()

    virtually(main)
