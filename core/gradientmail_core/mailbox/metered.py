"""What a mailbox costs: requests by verb, bytes each way, and dollars at AWS list prices.

Requests are counted when they are sent, because a store bills those that fail too.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry, Mailbox

Count: TypeAlias = Literal["gets", "puts", "creates", "lists", "deletes", "bytes_up", "bytes_down"]

LIST_PAGE = 1000  # entries of one LIST request on S3, GCS and Azure
DOLLARS_PER_WRITE = 5e-6  # PUT and LIST, S3 Standard, us-east-1
DOLLARS_PER_GET = 4e-7


@dataclass(frozen=True, slots=True)
class Usage:
    """Requests by verb and bytes of bodies each way, up to some moment or between two."""

    gets: int = 0
    puts: int = 0
    creates: int = 0
    lists: int = 0
    deletes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def requests(self) -> int:
        """All requests."""
        return self.gets + self.puts + self.creates + self.lists + self.deletes

    @property
    def dollars(self) -> float:
        """Price of the requests: PUT and LIST $5, GET $0.40 per million, DELETE free; no egress, no storage."""
        return DOLLARS_PER_WRITE * (self.puts + self.creates + self.lists) + DOLLARS_PER_GET * self.gets

    def since(self, earlier: "Usage") -> "Usage":
        """What was used between ``earlier`` and this snapshot."""
        return Usage(*(getattr(self, name) - getattr(earlier, name) for name in Usage.__slots__))


class MeteredMailbox:
    """Counts what passes through to ``inner``."""

    def __init__(self, inner: Mailbox) -> None:
        self._inner = inner
        self._usage = Usage()

    def __repr__(self) -> str:
        return f"MeteredMailbox({self._inner!r})"

    @property
    def usage(self) -> Usage:
        """Everything used so far."""
        return self._usage

    @property
    def url(self) -> str:
        """The inner mailbox's."""
        return self._inner.url

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        self._count("gets")
        body = await self._inner.get(key, limit=limit)
        self._count("bytes_down", len(body or b""))
        return body

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        self._count("puts")
        self._count("bytes_up", memoryview(body).nbytes)
        await self._inner.put(key, body)

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        self._count("creates")
        self._count("bytes_up", memoryview(body).nbytes)
        return await self._inner.create(key, body)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`; one request for every :data:`LIST_PAGE` entries begun."""
        self._count("lists")
        entries = 0
        async for entry in self._inner.list(prefix, after=after):
            entries += 1
            if entries > LIST_PAGE and entries % LIST_PAGE == 1:
                self._count("lists")
            yield entry

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`."""
        self._count("deletes")
        await self._inner.delete(key)

    async def close(self) -> None:
        """Close the inner mailbox."""
        await self._inner.close()

    def _count(self, name: Count, amount: int = 1) -> None:
        self._usage = replace(self._usage, **{name: getattr(self._usage, name) + amount})
