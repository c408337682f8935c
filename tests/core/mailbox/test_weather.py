"""A real server behind a bad line: everything is written once, read whole, and nobody wins who did not."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gradientmail_core.clock import SystemClock
from gradientmail_core.errors import MailboxUnavailable
from gradientmail_core.events import StoreStalled
from gradientmail_core.mailbox import RetryingMailbox, RetryPolicy
from gradientmail_core.mailbox.objectstore.location import Backend
from gradientmail_core.protocol.exchange import Lost, Won, create_once
from tests.core.mailbox.proxy import Proxy, Weather, proxied
from tests.core.mailbox.servers import S3Server

both = pytest.mark.parametrize("backend", ["s3fs", "obstore"])
POLICY = RetryPolicy(deadline=1.0, first_wait=0.01, longest_wait=0.1, burst=1000, per_second=1000.0, report_after=0.5)


@asynccontextmanager
async def behind(
    proxy: Proxy, server: S3Server, prefix: str, backend: Backend, events: list[StoreStalled]
) -> AsyncIterator[RetryingMailbox]:
    """A mailbox on the far side of the proxy that does not give up."""
    inner = S3Server(proxy.url, server.bucket).mailbox(prefix, backend)
    try:
        yield RetryingMailbox(inner, SystemClock(), random.Random(0), events.append, POLICY)
    finally:
        await inner.close()


@both
@pytest.mark.parametrize(
    "weather",
    [
        Weather(refuse=0.3, busy=0.3),
        Weather(cut=0.15),
        Weather(cut_answer=0.3),
        Weather(latency=0.02, bandwidth=20e6),
    ],
    ids=["storm", "cuts", "lost-answers", "slow"],
)
def test_writes_and_races_through_bad_weather(moto_server: S3Server, backend: Backend, weather: Weather) -> None:
    body = random.Random(1).randbytes(200_000)
    prefix = f"weather-{backend}-{id(weather)}"

    async def work() -> None:
        clock, events = SystemClock(), list[StoreStalled]()
        async with behind(proxy, moto_server, prefix, backend, events) as mailbox:
            await asyncio.gather(*(mailbox.put(f"k/{n}", body) for n in range(8)))
            races = [create_once(mailbox, clock, f"race/{n % 4}", b"racer %d" % n) for n in range(16)]
            outcomes = await asyncio.gather(*races)
            for race in range(4):
                found = await mailbox.get(f"race/{race}")
                won = [n for n in range(race, 16, 4) if isinstance(outcomes[n], Won)]
                assert len(won) == 1 and found == b"racer %d" % won[0]
                assert {outcome.body for outcome in outcomes[race::4] if isinstance(outcome, Lost)} == {found}
            assert await asyncio.gather(*(mailbox.get(f"k/{n}") for n in range(8))) == [body] * 8
            assert len([entry async for entry in mailbox.list("")]) == 12

    with proxied(moto_server.endpoint_url) as proxy:
        proxy.weather = weather
        asyncio.run(work())


@both
def test_silence_is_noticed_reported_and_outlasted(moto_server: S3Server, backend: Backend) -> None:
    events: list[StoreStalled] = []

    async def work() -> None:
        async with behind(proxy, moto_server, f"silence-{backend}", backend, events) as mailbox:
            await mailbox.put("before", b"1")
            proxy.weather = Weather(silent=True)
            call = asyncio.ensure_future(mailbox.put("during", b"2"))
            while not events:
                await asyncio.sleep(0.05)
            proxy.weather = Weather()
            await call
            assert await mailbox.get("during") == b"2"

    with proxied(moto_server.endpoint_url) as proxy:
        asyncio.run(work())
    assert "No answer" in events[0].cause


@both
def test_without_retries_a_fault_is_told(moto_server: S3Server, backend: Backend) -> None:
    async def work() -> None:
        mailbox = S3Server(proxy.url, moto_server.bucket).mailbox("once", backend)
        for weather in (Weather(busy=1.0), Weather(refuse=1.0), Weather(cut=1.0), Weather(cut_answer=1.0)):
            proxy.weather = weather
            with pytest.raises(MailboxUnavailable):
                await mailbox.put("a", b"x")
        await mailbox.close()

    with proxied(moto_server.endpoint_url) as proxy:
        asyncio.run(work())
