"""A mailbox behind a slow line: latency per request and bandwidth each way, on the injected clock.

Each direction is one line that transfers share first come, first served, so several bodies at once take
as long as one after the other, as they would. Requests and answers without a body slip in between.
"""

from collections.abc import AsyncIterator

from gradientmail_core.clock import Clock
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry, Mailbox, Page
from gradientmail_core.mailbox.metered import LIST_PAGE

ENTRY_BYTES = 300  # of a listing's XML, about


class Line:
    """One direction: ``rate`` bytes per second, or as fast as it goes if None."""

    def __init__(self, clock: Clock, rate: float | None) -> None:
        if rate is not None and not rate > 0:
            raise ConfigurationError(f"A bandwidth of {rate} bytes per second lets nothing through.")
        self._clock = clock
        self._rate = rate
        self._free_at = clock.now()

    async def carry(self, size: int, latency: float) -> None:
        """Return when ``size`` bytes have arrived, ``latency`` seconds after the last one left."""
        if self._rate is not None and size:
            self._free_at = max(self._free_at, self._clock.now()) + size / self._rate
            latency += self._free_at - self._clock.now()
        await self._clock.sleep(latency)


class ThrottledMailbox:
    """``up`` and ``down`` in bytes per second, ``latency`` in seconds per round trip."""

    def __init__(
        self, inner: Mailbox, clock: Clock, *, up: float | None = None, down: float | None = None, latency: float = 0.0
    ) -> None:
        self._inner = inner
        self._up, self._down = Line(clock, up), Line(clock, down)
        self._half = latency / 2

    def __repr__(self) -> str:
        return f"ThrottledMailbox({self._inner!r})"

    @property
    def url(self) -> str:
        """The inner mailbox's."""
        return self._inner.url

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        await self._up.carry(0, self._half)
        body = await self._inner.get(key, limit=limit)
        await self._down.carry(len(body or b""), self._half)
        return body

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        await self._up.carry(memoryview(body).nbytes, self._half)
        await self._inner.put(key, body)
        await self._down.carry(0, self._half)

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        await self._up.carry(memoryview(body).nbytes, self._half)
        outcome = await self._inner.create(key, body)
        await self._down.carry(0, self._half)
        return outcome

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`; every page is a round trip."""
        page: Page = []
        async for entry in self._inner.list(prefix, after=after):
            page.append(entry)
            if len(page) == LIST_PAGE:
                await self._turn(page)
                for arrived in page:
                    yield arrived
                page = []
        await self._turn(page)
        for arrived in page:
            yield arrived

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`."""
        await self._up.carry(0, self._half)
        await self._inner.delete(key)
        await self._down.carry(0, self._half)

    async def close(self) -> None:
        """Close the inner mailbox."""
        await self._inner.close()

    async def _turn(self, page: Page) -> None:
        await self._up.carry(0, self._half)
        await self._down.carry(len(page) * ENTRY_BYTES, self._half)
