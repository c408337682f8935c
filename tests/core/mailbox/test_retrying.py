"""Outages become waiting: bounded attempts, missed deadlines, reports, and answers passed through."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gradientmail_core.errors import MailboxDenied, MailboxUnavailable, PayloadTooLarge
from gradientmail_core.events import StoreStalled
from gradientmail_core.mailbox import CreateOutcome, Entry, Mailbox, MemoryMailbox, RetryingMailbox, RetryPolicy
from gradientmail_core.mailbox.base import Body, MailboxThrottled
from tests.core.mailbox.virtual import VirtualClock, run_virtually

Fault = Callable[[int], Awaitable[None]]


class Failing(MemoryMailbox):
    """Every request first passes ``fault``, which is told how many came before."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault
        self.attempts = 0

    async def _meet(self) -> None:
        self.attempts += 1
        await self._fault(self.attempts - 1)

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        await self._meet()
        return await super().get(key, limit=limit)

    async def put(self, key: str, body: Body) -> None:
        await self._meet()
        await super().put(key, body)

    async def create(self, key: str, body: Body) -> CreateOutcome:
        await self._meet()
        return await super().create(key, body)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        await self._meet()
        async for entry in super().list(prefix, after=after):
            yield entry

    async def delete(self, key: str) -> None:
        await self._meet()
        await super().delete(key)


def fails(times: int, error: type[Exception] = MailboxUnavailable) -> Fault:
    async def fault(attempt: int) -> None:
        if attempt < times:
            raise error("down")

    return fault


async def every_verb(mailbox: Mailbox) -> None:
    await mailbox.put("a", b"1")
    assert await mailbox.create("b", b"2") is CreateOutcome.CREATED
    assert await mailbox.create("b", b"3") is CreateOutcome.TAKEN
    assert await mailbox.get("b") == b"2"
    assert [entry.key async for entry in mailbox.list("")] == ["a", "b"]
    await mailbox.delete("a")
    assert [entry.key async for entry in mailbox.list("")] == ["b"]


def test_every_verb_outlasts_faults() -> None:
    async def odd(attempt: int) -> None:
        if attempt % 3:
            raise MailboxUnavailable("down")

    async def work(clock: VirtualClock) -> None:
        inner = Failing(odd)
        await every_verb(RetryingMailbox(inner, clock, random.Random(0)))
        assert inner.attempts == 7 + 2 * 6

    run_virtually(work)


@pytest.mark.parametrize("error", [MailboxDenied, PayloadTooLarge])
def test_lasting_faults_are_not_repeated(error: type[Exception]) -> None:
    async def work(clock: VirtualClock) -> None:
        inner = Failing(fails(1, error))
        with pytest.raises(error):
            await RetryingMailbox(inner, clock, random.Random(0)).get("a")
        assert inner.attempts == 1

    run_virtually(work)


def test_a_storm_meets_one_budget_for_all_requests() -> None:
    """503 for 60 s with 40 requests waiting: their first attempts, the burst, and one retry a second."""
    policy = RetryPolicy()

    async def work(clock: VirtualClock) -> None:
        async def storm(attempt: int) -> None:
            if clock.now() < 60:
                raise MailboxUnavailable("503")

        inner = Failing(storm)
        mailbox = RetryingMailbox(inner, clock, random.Random(1), policy=policy)
        await asyncio.gather(*(mailbox.put(f"k/{n}", b"x") for n in range(40)))
        during = inner.attempts - 40
        assert during <= 40 + policy.burst + 60 * policy.per_second
        assert clock.now() < 60 + 40 / policy.per_second + policy.longest_wait
        assert len([entry async for entry in mailbox.list("k/")]) == 40

    run_virtually(work)


def test_waits_grow_and_are_jittered() -> None:
    async def work(clock: VirtualClock) -> list[float]:
        times: list[float] = []

        async def fault(attempt: int) -> None:
            times.append(clock.now())
            if attempt < 8:
                raise MailboxUnavailable("down")

        await RetryingMailbox(Failing(fault), clock, random.Random(3)).get("a")
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    waits, policy = run_virtually(work), RetryPolicy()
    for attempt, wait in enumerate(waits):
        whole = min(policy.longest_wait, policy.first_wait * 2**attempt)
        assert whole / 2 <= wait <= whole
    assert len({wait / (policy.first_wait * 2**n) for n, wait in enumerate(waits[:5])}) == 5


def test_the_wait_a_store_asks_for_is_kept() -> None:
    async def work(clock: VirtualClock) -> float:
        async def fault(attempt: int) -> None:
            if attempt == 0:
                raise MailboxThrottled("429", 42.0)

        await RetryingMailbox(Failing(fault), clock, random.Random(0)).get("a")
        return clock.now()

    assert run_virtually(work) >= 42


def test_silence_ends_at_a_deadline_and_the_request_is_sent_again() -> None:
    async def work(clock: VirtualClock) -> list[float]:
        started: list[float] = []

        async def black_hole(attempt: int) -> None:
            started.append(clock.now())
            if attempt < 3:
                await clock.sleep(1e9)

        mailbox = RetryingMailbox(Failing(black_hole), clock, random.Random(0))
        await mailbox.put("a", b"x" * 10)
        assert await mailbox.get("a") == b"x" * 10
        return started

    started = run_virtually(work)
    waits = [later - earlier for earlier, later in itertools.pairwise(started)][:3]
    assert [round(wait / 30) for wait in waits] == [1, 2, 4]


def test_a_large_body_has_a_later_deadline() -> None:
    policy, size = RetryPolicy(deadline=1, slowest=1000), 10_000

    async def work(clock: VirtualClock) -> int:
        async def slow(attempt: int) -> None:
            await clock.sleep(size / policy.slowest)

        inner = Failing(slow)
        await RetryingMailbox(inner, clock, random.Random(0), policy=policy).put("a", b"x" * size)
        return inner.attempts

    assert run_virtually(work) == 1


def test_a_listing_may_be_long_but_not_silent() -> None:
    class Pages(MemoryMailbox):
        """A page every 20 s, and one silence."""

        silent = True

        def __init__(self, clock: VirtualClock) -> None:
            super().__init__()
            self._clock = clock

        async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
            for n in range(10):
                await self._clock.sleep(1e9 if self.silent and n == 5 else 20)
                yield Entry(f"k/{n}", n)

    async def work(clock: VirtualClock) -> None:
        inner = Pages(clock)
        mailbox = RetryingMailbox(inner, clock, random.Random(0))
        listing = asyncio.ensure_future(_listed(mailbox))
        while clock.now() < 140:
            await clock.sleep(1)
        inner.silent = False
        assert [entry.size for entry in await listing] == list(range(10))
        assert clock.now() > 140 + 200

    run_virtually(work)


async def _listed(mailbox: Mailbox) -> list[Entry]:
    return [entry async for entry in mailbox.list("")]


def test_the_owner_hears_of_a_long_silence() -> None:
    async def work(clock: VirtualClock) -> list[StoreStalled]:
        events: list[StoreStalled] = []

        async def storm(attempt: int) -> None:
            if clock.now() < 300:
                raise MailboxUnavailable("503 Slow Down")

        mailbox = RetryingMailbox(Failing(storm), clock, random.Random(0), events.append)
        await asyncio.gather(mailbox.get("a"), mailbox.get("b"))
        return events

    events = run_virtually(work)
    assert 4 <= len(events) <= 8
    assert events[0].seconds < 30
    assert [event.seconds for event in events] == sorted(event.seconds for event in events)
    assert {event.cause for event in events} == {"503 Slow Down"}


def test_a_short_fault_is_not_reported() -> None:
    events: list[StoreStalled] = []

    async def work(clock: VirtualClock) -> None:
        await RetryingMailbox(Failing(fails(4)), clock, random.Random(0), events.append).get("a")

    run_virtually(work)
    assert events == []


def test_equal_seeds_wait_alike() -> None:
    async def work(clock: VirtualClock) -> float:
        await RetryingMailbox(Failing(fails(6)), clock, random.Random(5)).get("a")
        return clock.now()

    assert run_virtually(work) == run_virtually(work)


def test_cancelling_ends_the_request() -> None:
    async def work(clock: VirtualClock) -> None:
        async def black_hole(attempt: int) -> None:
            await clock.sleep(1e9)

        inner = Failing(black_hole)
        call = asyncio.ensure_future(RetryingMailbox(inner, clock, random.Random(0)).get("a"))
        await clock.sleep(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await clock.sleep(1000)
        assert inner.attempts == 1

    run_virtually(work)
