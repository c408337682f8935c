"""Mailboxes around stores that keep less than the contract, each making up for one thing they lack.

*Two creates may both succeed* (a store that looks and then writes): who created waits until every rival has
written too, and then reads. The last writer's bytes are what everyone finds, so it alone has created.

*Nothing stops a create from overwriting*: then only one process may create at all, and looking first is enough.

*The store remembers that an object was missing*: it is not asked for anything that a listing does not show.
"""

from collections.abc import AsyncIterator

from gradientmail_core.clock import Clock
from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry, Mailbox, checked_key

SETTLED_SECONDS = 2.0


class _Around:
    """Passes everything on to ``inner``."""

    def __init__(self, inner: Mailbox) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    @property
    def url(self) -> str:
        """The inner mailbox's."""
        return self._inner.url

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        return await self._inner.get(key, limit=limit)

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        await self._inner.put(key, body)

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        return await self._inner.create(key, body)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`."""
        async for entry in self._inner.list(prefix, after=after):
            yield entry

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`."""
        await self._inner.delete(key)

    async def close(self) -> None:
        """Close the inner mailbox."""
        await self._inner.close()


class ReadBackMailbox(_Around):
    """For a store whose creates race: one has created only if its bytes are there :data:`SETTLED_SECONDS` later."""

    def __init__(self, inner: Mailbox, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        outcome = await self._inner.create(key, body)
        if outcome is CreateOutcome.TAKEN:
            return outcome
        await self._clock.sleep(SETTLED_SECONDS)
        kept = await self._inner.get(key, limit=None)
        return CreateOutcome.CREATED if kept == bytes(body) else CreateOutcome.TAKEN


class OneWriterMailbox(_Around):
    """For a store that knows no condition, and the only process that creates: it looks, and then puts."""

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        if await self._inner.get(key) is not None:
            return CreateOutcome.TAKEN
        await self._inner.put(key, body)
        return CreateOutcome.CREATED


class ListedMailbox(_Around):
    """For a store that remembers absence: a listing before every read."""

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        listed = [entry.key async for entry in self._inner.list(checked_key(key))]
        return await self._inner.get(key, limit=limit) if key in listed else None
