"""Each fault alone, in virtual time; then all at once, twice, from one seed."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from gradientmail_core.errors import MailboxUnavailable
from gradientmail_core.mailbox import CreateOutcome, Entry, Faults, FaultyMailbox, Mailbox, MemoryMailbox
from tests.core.mailbox.virtual import VirtualClock, run_virtually

T = TypeVar("T")


def behind(faults: Faults, work: Callable[[FaultyMailbox, MemoryMailbox, VirtualClock], Awaitable[T]]) -> T:
    """The result of ``work`` on a faulty mailbox over one that holds ``a``, which contains ``old``."""

    async def main(clock: VirtualClock) -> T:
        inner = MemoryMailbox()
        await inner.put("a", b"old")
        return await work(FaultyMailbox(inner, clock, random.Random(7), faults), inner, clock)

    return run_virtually(main)


async def refused(call: Awaitable[object]) -> None:
    with pytest.raises(MailboxUnavailable):
        await call


async def listed(mailbox: Mailbox) -> list[Entry]:
    return [entry async for entry in mailbox.list("")]


def test_unavailable_does_nothing_at_once() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        for call in (mailbox.get("a"), mailbox.put("a", b"new"), mailbox.create("b", b""), mailbox.delete("a")):
            await refused(call)
        await refused(listed(mailbox))
        assert await listed(inner) == [Entry("a", 3)]
        assert await inner.get("a") == b"old"
        assert clock.now() == 0

    behind(Faults(unavailable=1), work)


def test_a_time_out_takes_its_time_and_does_nothing() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        await refused(mailbox.put("a", b"new"))
        assert clock.now() == 30
        assert await inner.get("a") == b"old"

    behind(Faults(time_out=1, patience=30), work)


def test_a_lost_answer_is_a_write_that_landed() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        await refused(mailbox.put("a", b"new"))
        await refused(mailbox.create("b", b"mine"))
        assert await inner.get("a") == b"new"
        assert await inner.get("b") == b"mine"
        await refused(mailbox.delete("a"))
        assert await inner.get("a") is None

    behind(Faults(lost_answer=1), work)


def test_a_late_write_lands_after_the_caller_gave_up() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        buffer = bytearray(b"late")
        await refused(mailbox.create("b", buffer))
        buffer[:] = b"junk"
        assert await inner.get("b") is None
        await clock.sleep(60)
        assert await inner.get("b") == b"late"

    behind(Faults(late_write=1, lateness=60), work)


def test_a_late_create_does_not_overwrite() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        await refused(mailbox.create("b", b"late"))
        assert await inner.create("b", b"first") is CreateOutcome.CREATED
        await clock.sleep(60)
        assert await inner.get("b") == b"first"

    behind(Faults(late_write=1), work)


def test_undecided_concerns_creates_only() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        await refused(mailbox.create("b", b"x"))
        assert await inner.get("b") is None
        await mailbox.put("a", b"new")
        assert await mailbox.get("a") == b"new"

    behind(Faults(undecided=1), work)


def test_a_read_that_breaks_off_is_noticed() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        await refused(mailbox.get("a"))
        await refused(listed(mailbox))
        await mailbox.put("a", b"new")

    behind(Faults(broken_read=1), work)


def test_a_missing_read_finds_nothing() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        assert await mailbox.get("a") is None

    behind(Faults(missing_read=1), work)


def test_a_slow_call_succeeds() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        assert await mailbox.get("a") == b"old"
        assert 0 < clock.now() <= 5

    behind(Faults(slow=1, slowness=5), work)


def test_listings_repeat_omit_and_shuffle() -> None:
    async def shuffled(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> list[str]:
        for n in range(20):
            await inner.put(f"k/{n:02d}", b"")
        return [entry.key for entry in await listed(mailbox)]

    plain = behind(Faults(), shuffled)
    assert sorted(plain) != plain and len(set(plain)) == 21
    assert len(behind(Faults(repeated=1), shuffled)) == 42
    assert 0 < len(behind(Faults(unlisted=0.5), shuffled)) < 21
    assert behind(Faults(unlisted=1), shuffled) == []


def test_outages_and_partitions_refuse_everything() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        assert await mailbox.get("a") == b"old"
        await clock.sleep(10)
        await refused(mailbox.get("a"))
        await refused(listed(mailbox))
        await clock.sleep(10)
        assert await mailbox.get("a") == b"old"
        mailbox.partitioned = True
        await refused(mailbox.put("a", b"new"))
        mailbox.partitioned = False
        assert await mailbox.get("a") == b"old"

    behind(Faults(outages=((10, 20),)), work)


def test_closing_forgets_late_writes() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> None:
        await refused(mailbox.put("a", b"late"))
        await mailbox.close()
        await clock.sleep(100)
        assert await inner.get("a") == b"old"

    behind(Faults(late_write=1), work)


def history(seed: int) -> list[str]:
    """What a fixed program sees under every fault at once."""
    faults = Faults(
        unavailable=0.1,
        time_out=0.05,
        undecided=0.1,
        lost_answer=0.1,
        late_write=0.1,
        broken_read=0.1,
        missing_read=0.1,
        slow=0.1,
        repeated=0.1,
        unlisted=0.1,
        outages=((100, 150),),
    )

    async def main(clock: VirtualClock) -> list[str]:
        inner, seen = MemoryMailbox(now=clock.now), list[str]()
        mailbox = FaultyMailbox(inner, clock, random.Random(seed), faults)
        for turn in range(200):
            key = f"k/{turn % 17}"
            calls = (
                mailbox.put(key, b"%d" % turn),
                mailbox.create(f"c/{turn}", b""),
                mailbox.get(key),
                listed(mailbox),
            )
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                seen.append(f"{clock.now():.6f} {answer!r}")
        await clock.sleep(100)
        return [*seen, repr(await listed(inner))]

    return run_virtually(main)


def test_equal_seeds_fail_alike() -> None:
    assert history(1) == history(1)
    assert history(1) != history(2)


def test_about_as_many_faults_as_asked_for() -> None:
    async def work(mailbox: FaultyMailbox, inner: MemoryMailbox, clock: VirtualClock) -> int:
        failures = 0
        for _ in range(1000):
            try:
                await mailbox.get("a")
            except MailboxUnavailable:
                failures += 1
        return failures

    assert 230 < behind(Faults(unavailable=0.2, broken_read=0.1), work) < 370
