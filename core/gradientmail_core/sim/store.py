"""A store in virtual time: requests take time, answers may be lost, and everything is seeded.

Wraps a :class:`MemoryMailbox` for one node. Latency is drawn for every request and bandwidth is the node's
own. A fault either loses the request before it takes effect or its answer after; the caller sees the same
:class:`MailboxUnavailable` and cannot tell which, as with a real store. A write may be late: its caller is told
that it failed, or is dead by then, and it lands all the same, seconds later. Requests of different nodes overtake
each other.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from gradientmail_core.clock import Clock
from gradientmail_core.errors import MailboxUnavailable
from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry
from gradientmail_core.mailbox.memory import MemoryMailbox

LATE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Weather:
    """How a node's way to the store behaves: seconds, bytes per second, and chances per request."""

    latency: float = 0.01
    bandwidth: float = 1e8
    request_lost: float = 0.0
    answer_lost: float = 0.0
    write_late: float = 0.0
    listing_lags: float = 0.0


class SimulatedStore:
    """One node's connection to a shared memory mailbox. ``up`` False is an outage or a partition."""

    def __init__(self, inner: MemoryMailbox, clock: Clock, seed: int, weather: Weather | None = None) -> None:
        self._inner = inner
        self._clock = clock
        self._random = random.Random(seed)
        self.weather = weather or Weather()
        self.up = True
        self._landing: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The shared mailbox's."""
        return self._inner.url

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        await self._request()
        body = await self._inner.get(key, limit=limit)
        await self._answer(len(body or b""))
        return body

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        content = bytes(body)
        await self._request(len(content))
        if self._random.random() < self.weather.write_late:
            await self._late(lambda: self._inner.put(key, content))
        await self._inner.put(key, content)
        await self._answer()

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        content = bytes(body)
        await self._request(len(content))
        if self._random.random() < self.weather.write_late:
            await self._late(lambda: self._inner.create(key, content))
        outcome = await self._inner.create(key, content)
        await self._answer()
        return outcome

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`; a lagging listing misses some entries, and order is random."""
        await self._request()
        entries = [entry async for entry in self._inner.list(prefix, after=after)]
        if self._random.random() < self.weather.listing_lags:
            entries = [entry for entry in entries if self._random.random() < 0.8]
        self._random.shuffle(entries)
        await self._answer()
        for entry in entries:
            yield entry

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`."""
        await self._request()
        await self._inner.delete(key)
        await self._answer()

    async def close(self) -> None:
        """Nothing to release."""

    async def _late(self, write: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Let the write land later, whatever becomes of its caller, who is told that it failed."""

        async def landing() -> None:
            await asyncio.sleep(self._random.uniform(0.1, LATE_SECONDS))
            await write()

        self._landing.add(task := asyncio.ensure_future(landing()))
        task.add_done_callback(self._landing.discard)
        raise MailboxUnavailable("The simulated store did not say whether it took the write.")

    async def _request(self, size: int = 0) -> None:
        seconds = self._random.expovariate(1 / self.weather.latency) / 2 + size / self.weather.bandwidth
        await self._clock.sleep(seconds)
        if not self.up or self._random.random() < self.weather.request_lost:
            raise MailboxUnavailable("The simulated store did not get the request.")

    async def _answer(self, size: int = 0) -> None:
        seconds = self._random.expovariate(1 / self.weather.latency) / 2 + size / self.weather.bandwidth
        await self._clock.sleep(seconds)
        if not self.up or self._random.random() < self.weather.answer_lost:
            raise MailboxUnavailable("The simulated store's answer was lost.")
