"""The simulated store: seeded latency and faults, and a caller cannot tell on which side of the effect they struck."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gradientmail_core.errors import MailboxUnavailable, PayloadTooLarge
from gradientmail_core.mailbox.base import CreateOutcome
from gradientmail_core.mailbox.memory import MemoryMailbox
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.store import LATE_SECONDS, PAGE_KEYS, SimulatedStore, Weather


def with_store(weather: Weather, main: Callable[..., Coroutine[Any, Any, Any]], seed: int = 0) -> Any:
    """Run ``main(store, shared mailbox, loop)`` on virtual time."""

    async def placed(loop: VirtualLoop) -> Any:
        shared = MemoryMailbox("run")
        return await main(SimulatedStore(shared, VirtualClock(loop), seed, weather), shared, loop)

    return run_virtually(placed)


async def listed(store: Any, prefix: str = "") -> list[str]:
    return [entry.key async for entry in store.list(prefix)]


def test_in_good_weather_it_is_the_mailbox_behind_it() -> None:
    async def main(store: SimulatedStore, shared: MemoryMailbox, loop: Any) -> None:
        assert await store.create("a/1", b"one") is CreateOutcome.CREATED
        assert await store.create("a/1", b"two") is CreateOutcome.TAKEN
        await store.put("a/2", bytearray(b"two"))
        assert await store.get("a/1") == b"one" and await store.get("a/3") is None
        assert sorted(await listed(store, "a/")) == ["a/1", "a/2"]
        assert [entry.key async for entry in store.list("a/", after="a/1")] == ["a/2"]
        await store.delete("a/1")
        assert await shared.get("a/1") is None
        with pytest.raises(PayloadTooLarge):
            await store.get("a/2", limit=2)
        assert store.url == shared.url
        await store.close()

    with_store(Weather(), main)


def test_a_listing_costs_a_request_for_each_page_and_comes_in_order_if_asked_for() -> None:
    async def main(store: SimulatedStore, shared: MemoryMailbox, loop: Any) -> None:
        keys = [f"a/{number:04d}" for number in range(PAGE_KEYS + 1)]
        for key in keys:
            await shared.put(key, b"")
        assert await listed(store, "a/") == keys and store.traffic.lists == 2
        assert await listed(store, "a/0") == keys[:-1] and store.traffic.lists == 3
        assert [entry.key for entry in await store.whole("b/")] == [] and store.traffic.lists == 4

    with_store(Weather(ordered=True), main)


def test_requests_take_time_and_bodies_take_longer() -> None:
    async def main(store: SimulatedStore, shared: MemoryMailbox, loop: Any) -> None:
        for number in range(200):
            await store.put(f"a/{number}", b"")
        assert loop.time() / 200 == pytest.approx(0.1, rel=0.2)
        before = loop.time()
        await store.put("big", bytes(10_000))
        assert loop.time() - before >= 10.0
        before = loop.time()
        await store.get("big")
        assert loop.time() - before >= 10.0

    with_store(Weather(latency=0.1, bandwidth=1000.0), main)


def test_equal_seeds_play_equal_weather() -> None:
    weather = Weather(latency=0.1, request_lost=0.3, answer_lost=0.3, listing_lags=0.5)

    async def main(store: SimulatedStore, shared: MemoryMailbox, loop: Any) -> list[tuple[float, bool]]:
        seen = []
        for number in range(50):
            try:
                await store.put(f"a/{number}", b"x")
                seen.append((loop.time(), True))
            except MailboxUnavailable:
                seen.append((loop.time(), False))
        return seen

    assert with_store(weather, main, seed=1) == with_store(weather, main, seed=1)
    assert with_store(weather, main, seed=1) != with_store(weather, main, seed=2)


@pytest.mark.parametrize(("weather", "there"), [(Weather(request_lost=1.0), False), (Weather(answer_lost=1.0), True)])
def test_a_caller_cannot_tell_a_lost_request_from_a_lost_answer(weather: Weather, there: bool) -> None:
    async def main(store: SimulatedStore, shared: MemoryMailbox, loop: Any) -> None:
        with pytest.raises(MailboxUnavailable):
            await store.create("a", b"one")
        assert (await shared.get("a") is not None) == there
        for request in (store.get("a"), store.put("a", b""), store.delete("b"), listed(store)):
            with pytest.raises(MailboxUnavailable):
                await request

    with_store(weather, main)


def test_a_late_write_lands_after_its_caller_gave_up() -> None:
    async def main(store: SimulatedStore, shared: MemoryMailbox, loop: Any) -> None:
        with pytest.raises(MailboxUnavailable):
            await store.create("a", b"one")
        assert await shared.get("a") is None
        await shared.create("a", b"two")
        with pytest.raises(MailboxUnavailable):
            await store.put("b", b"one")
        await asyncio.sleep(LATE_SECONDS)
        assert await shared.get("a") == b"two", "a late create wins no key that is taken"
        assert await shared.get("b") == b"one"

    with_store(Weather(write_late=1.0), main)


def test_a_lagging_listing_misses_some_and_invents_none() -> None:
    async def main(store: SimulatedStore, shared: MemoryMailbox, loop: Any) -> None:
        keys = [f"a/{number:03d}" for number in range(200)]
        for key in keys:
            await shared.put(key, b"")
        seen = await listed(store)
        assert set(seen) < set(keys) and len(seen) > 100
        assert seen != sorted(seen), "no order is promised"

    with_store(Weather(listing_lags=1.0), main)


def test_an_outage_ends_every_request_and_what_was_under_way() -> None:
    async def main(store: SimulatedStore, shared: MemoryMailbox, loop: Any) -> None:
        under_way = asyncio.ensure_future(store.put("a", bytes(1000)))
        await asyncio.sleep(0.5)
        store.up = False
        with pytest.raises(MailboxUnavailable):
            await under_way
        with pytest.raises(MailboxUnavailable):
            await store.get("a")
        store.up = True
        await store.put("a", b"")
        assert await store.get("a") == b""

    with_store(Weather(bandwidth=1000.0), main)


def test_a_body_is_taken_as_it_was_when_the_request_began() -> None:
    async def main(store: SimulatedStore, shared: MemoryMailbox, loop: Any) -> None:
        body = bytearray(b"before")
        putting = asyncio.ensure_future(store.put("a", body))
        await asyncio.sleep(0)
        body[:] = b"after!"
        await putting
        assert await shared.get("a") == b"before"

    with_store(Weather(), main)
