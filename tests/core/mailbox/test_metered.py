"""Requests, bytes and dollars are counted as a store would bill them."""

import asyncio
from dataclasses import FrozenInstanceError

import pytest

from gradientmail_core.errors import MailboxUnavailable
from gradientmail_core.mailbox import Entry, MemoryMailbox, MeteredMailbox, Usage
from gradientmail_core.mailbox.metered import LIST_PAGE


def test_counts_by_verb_and_bytes_each_way() -> None:
    async def work() -> None:
        mailbox = MeteredMailbox(MemoryMailbox())
        await mailbox.put("a", b"12345")
        await mailbox.create("b", bytearray(3))
        await mailbox.create("b", memoryview(b"1234"))
        await mailbox.get("a")
        before = mailbox.usage
        await mailbox.get("missing")
        await mailbox.delete("a")
        assert [entry async for entry in mailbox.list("")] == [Entry("b", 3)]
        assert before == Usage(gets=1, puts=1, creates=2, bytes_up=12, bytes_down=5)
        assert mailbox.usage.since(before) == Usage(gets=1, deletes=1, lists=1)
        assert mailbox.usage.requests == 7

    asyncio.run(work())


def test_dollars_at_list_prices() -> None:
    million = 1_000_000
    assert (
        Usage(puts=million).dollars
        == Usage(creates=million).dollars
        == Usage(lists=million).dollars
        == pytest.approx(5)
    )
    assert Usage(gets=million).dollars == pytest.approx(0.4)
    assert Usage(deletes=million, bytes_up=10**12, bytes_down=10**12).dollars == 0


@pytest.mark.parametrize(("entries", "requests"), [(0, 1), (LIST_PAGE, 1), (LIST_PAGE + 1, 2), (2 * LIST_PAGE + 1, 3)])
def test_a_long_listing_is_several_requests(entries: int, requests: int) -> None:
    async def work() -> int:
        inner = MemoryMailbox()
        for n in range(entries):
            await inner.put(f"{n:06d}", b"")
        mailbox = MeteredMailbox(inner)
        assert len([entry async for entry in mailbox.list("")]) == entries
        return mailbox.usage.lists

    assert asyncio.run(work()) == requests


def test_a_request_that_fails_is_billed_too() -> None:
    class Down(MemoryMailbox):
        async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
            raise MailboxUnavailable("down")

    async def work() -> None:
        mailbox = MeteredMailbox(Down())
        with pytest.raises(MailboxUnavailable):
            await mailbox.get("a")
        assert mailbox.usage == Usage(gets=1)

    asyncio.run(work())


def test_a_snapshot_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Usage().gets = 1  # type: ignore[misc]  # frozen, on purpose
