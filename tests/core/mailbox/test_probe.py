"""The probe tells honest stores from those that only look it."""

import asyncio
import secrets

import pytest

from gradientmail_core.errors import MailboxDenied, MailboxUnavailable
from gradientmail_core.mailbox import CreateOutcome, Mailbox, MemoryMailbox, probe_store
from gradientmail_core.mailbox.base import Body
from gradientmail_core.mailbox.probe import probe_key, remembers_absence
from tests.core.mailbox.defective import Ignoring, Incapable, Racing, Remembering


class Lying(MemoryMailbox):
    """Tells one writer that it won and keeps what another wrote."""

    async def create(self, key: str, body: Body) -> CreateOutcome:
        outcome = await super().create(key, body)
        if outcome is CreateOutcome.CREATED:
            await self.put(key, b"1 of " + key.encode())
        return outcome


class Forgetful(MemoryMailbox):
    """Loses every answer of the first sixteen, having done the work."""

    asked = 0

    async def create(self, key: str, body: Body) -> CreateOutcome:
        self.asked += 1
        outcome = await super().create(key, body)
        if self.asked <= 16:
            raise MailboxUnavailable("reset")
        return outcome


class Down(MemoryMailbox):
    """Answers nothing."""

    async def create(self, key: str, body: Body) -> CreateOutcome:
        raise MailboxUnavailable("503")


class Refusing(MemoryMailbox):
    """Lets nobody write."""

    async def create(self, key: str, body: Body) -> CreateOutcome:
        raise MailboxDenied("403")


@pytest.mark.parametrize(
    ("mailbox", "store"),
    [
        (MemoryMailbox(), "atomic"),
        (Forgetful(), "atomic"),
        (Racing(), "racy"),
        (Lying(), "racy"),
        (Ignoring(), "none"),
        (Incapable(), "none"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MemoryMailbox) else "",
)
def test_verdict(mailbox: Mailbox, store: str) -> None:
    async def work() -> None:
        found = await probe_store(mailbox)
        assert found.store == store
        assert found.reason
        assert [entry async for entry in mailbox.list("")] == []

    asyncio.run(work())


class Blinking(MemoryMailbox):
    """Does not find an object that it found before; once."""

    asked = 0

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        self.asked += 1
        return None if self.asked == 2 else await super().get(key, limit=limit)


@pytest.mark.parametrize(
    ("mailbox", "error"),
    [(Down(), MailboxUnavailable), (Refusing(), MailboxDenied), (Blinking(), MailboxUnavailable)],
    ids=lambda value: type(value).__name__ if isinstance(value, MemoryMailbox) else "",
)
def test_no_verdict_without_answers(mailbox: Mailbox, error: type[Exception]) -> None:
    with pytest.raises(error):
        asyncio.run(probe_store(mailbox))


def test_every_probe_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []

    class Watched(MemoryMailbox):
        async def delete(self, key: str) -> None:
            keys.append(key)
            await super().delete(key)

    asyncio.run(probe_store(Watched()))
    asyncio.run(probe_store(Watched(), key=f"probe/{secrets.token_hex(2)}"))
    assert len(set(keys)) == 2


@pytest.mark.parametrize(("mailbox", "remembers"), [(MemoryMailbox(), False), (Remembering(), True)])
def test_a_store_that_remembers_absence(mailbox: Mailbox, remembers: bool) -> None:
    async def work() -> None:
        assert await remembers_absence(mailbox, probe_key()) is remembers
        assert [entry async for entry in mailbox.list("")] == []

    asyncio.run(work())


def test_more_handles_take_part_in_the_race() -> None:
    class Counted(MemoryMailbox):
        creates = 0

        async def create(self, key: str, body: Body) -> CreateOutcome:
            Counted.creates += 1
            return await super().create(key, body)

    first, second = Counted(), Counted()
    second._objects, second._keys, second._listing = first._objects, first._keys, first._listing
    assert asyncio.run(probe_store(first, second, contenders=4)).store == "atomic"
    assert Counted.creates == 5
