"""A slow line in virtual time: exact durations, shared bandwidth."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox import Mailbox, MemoryMailbox, ThrottledMailbox
from gradientmail_core.mailbox.metered import LIST_PAGE
from gradientmail_core.mailbox.throttled import ENTRY_BYTES
from tests.core.mailbox.virtual import VirtualClock, run_virtually


def seconds(work: Callable[[Mailbox], Awaitable[object]], objects: int = 0) -> float:
    """How long ``work`` takes at 100 bytes/s up, 50 down and 2 s of latency."""

    async def timed(clock: VirtualClock) -> float:
        inner = MemoryMailbox()
        await inner.put("a", b"x" * 100)
        for n in range(objects):
            await inner.put(f"k/{n:06d}", b"")
        await work(ThrottledMailbox(inner, clock, up=100, down=50, latency=2))
        return clock.now()

    return run_virtually(timed)


def test_each_verb_takes_its_time() -> None:
    assert seconds(lambda mailbox: mailbox.put("b", b"x" * 300)) == pytest.approx(2 + 3)
    assert seconds(lambda mailbox: mailbox.create("b", b"x" * 50)) == pytest.approx(2 + 0.5)
    assert seconds(lambda mailbox: mailbox.get("a")) == pytest.approx(2 + 2)
    assert seconds(lambda mailbox: mailbox.get("missing")) == pytest.approx(2)
    assert seconds(lambda mailbox: mailbox.delete("a")) == pytest.approx(2)


def test_transfers_share_the_line() -> None:
    def three(mailbox: Mailbox) -> Awaitable[object]:
        return asyncio.gather(*(mailbox.put(f"b/{n}", b"x" * 100) for n in range(3)), mailbox.get("a"))

    assert seconds(three) == pytest.approx(2 + 3)


def test_every_page_of_a_listing_is_a_round_trip() -> None:
    async def read(mailbox: Mailbox) -> None:
        assert len([entry async for entry in mailbox.list("k/")]) == LIST_PAGE + 1

    assert seconds(read, LIST_PAGE + 1) == pytest.approx(2 * 2 + (LIST_PAGE + 1) * ENTRY_BYTES / 50)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_line_that_carries_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError):
        ThrottledMailbox(MemoryMailbox(), VirtualClock(), up=rate)
