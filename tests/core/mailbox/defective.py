"""Stores that lack one thing each, over a memory mailbox."""

import asyncio

from gradientmail_core.errors import MailboxUnsupported
from gradientmail_core.mailbox import CreateOutcome, MemoryMailbox
from gradientmail_core.mailbox.base import Body


class Ignoring(MemoryMailbox):
    """Accepts the condition and overwrites."""

    async def create(self, key: str, body: Body) -> CreateOutcome:
        await self.put(key, body)
        return CreateOutcome.CREATED


class Racing(MemoryMailbox):
    """Looks, and ``gap`` seconds later writes."""

    gap = 0.0

    async def create(self, key: str, body: Body) -> CreateOutcome:
        taken = await self.get(key) is not None
        await asyncio.sleep(self.gap)
        if taken:
            return CreateOutcome.TAKEN
        await self.put(key, body)
        return CreateOutcome.CREATED


class Incapable(MemoryMailbox):
    """Knows no conditions."""

    async def create(self, key: str, body: Body) -> CreateOutcome:
        raise MailboxUnsupported("501")


class Remembering(MemoryMailbox):
    """Never finds what it was once asked for in vain."""

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        self.missing: set[str] = set()

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        body = None if key in self.missing else await super().get(key, limit=limit)
        self.missing |= {key} if body is None else set()
        return body
