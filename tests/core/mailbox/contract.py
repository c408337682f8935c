"""What every mailbox must do, as scenarios: each takes a way to open fresh handles on one empty prefix.

They make no claim that a directory, an object store and a dictionary do not all satisfy, and each has been
seen to fail on a mailbox that breaks its rule.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest

from gradientmail_core.clock import SystemClock
from gradientmail_core.errors import ConfigurationError, MailboxDenied, MailboxUnavailable, PayloadTooLarge
from gradientmail_core.mailbox import (
    Body,
    CreateOutcome,
    Faults,
    FaultyMailbox,
    Mailbox,
    RetryingMailbox,
    RetryPolicy,
    probe_store,
)
from gradientmail_core.protocol.exchange import Lost, Won, create_once

Open = Callable[[], Mailbox]
Scenario = Callable[[Open], Coroutine[None, None, None]]

EVERY_BYTE = bytes(range(256))
LARGE = (33 << 20) + 1  # more than any backend sends in one request
RACERS = 16
BAD_KEYS = ("", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a/.b", "a b", "a\0b", "ä", "a\\b", "a" * 201, "c:\\x")
ODD_KEYS = ("A-Z_0.9/-a", "_", "a" * 200, "/".join(["segment-of-20-letters"] * 20), "a-1", "a.1", "x/1-2.3_4")


async def a_missing_object_is_none(open: Open) -> None:
    async with closing(open()) as mailbox:
        assert await mailbox.get("nothing/here") is None
        await mailbox.delete("nothing/here")
        assert await listed(mailbox, "") == {}


async def what_is_written_is_read(open: Open) -> None:
    async with closing(open()) as mailbox, closing(open()) as other:
        view = memoryview(EVERY_BYTE)[3:9]
        bodies: dict[str, Body] = {"empty": b"", "bytes": EVERY_BYTE, "array": bytearray(EVERY_BYTE), "view": view}
        for name, body in bodies.items():
            await mailbox.put(f"put/{name}", body)
            assert await mailbox.create(f"create/{name}", body) is CreateOutcome.CREATED
            assert await other.get(f"put/{name}") == await other.get(f"create/{name}") == bytes(body)


async def a_buffer_may_be_used_again(open: Open) -> None:
    async with closing(open()) as mailbox:
        buffer = bytearray(b"first")
        await mailbox.put("a", buffer)
        buffer[:] = b"later"
        assert await mailbox.get("a") == b"first"


async def create_has_one_winner(open: Open) -> None:
    async with closing(open()) as mailbox, closing(open()) as other:
        assert await mailbox.create("a/b", b"first") is CreateOutcome.CREATED
        for late in (mailbox, other):
            assert await late.create("a/b", b"late") is CreateOutcome.TAKEN
            assert await late.create("a/b", b"") is CreateOutcome.TAKEN
        assert await other.get("a/b") == b"first"


async def concurrent_creates_have_one_winner(open: Open) -> None:
    """Several keys at once, because SeaweedFS lets the losers of each wait for seconds."""
    keys = ["race/0", "race/1"]
    async with contextlib.AsyncExitStack() as stack:
        handles = [await stack.enter_async_context(closing(open())) for _ in range(4)]

        async def race(key: str) -> None:
            bodies = [b"%d " % racer * random.Random(key).randrange(1, 2000) for racer in range(RACERS)]
            outcomes = await asyncio.gather(*(handles[n % 4].create(key, body) for n, body in enumerate(bodies)))
            assert outcomes.count(CreateOutcome.CREATED) == 1
            assert await handles[0].get(key) == bodies[outcomes.index(CreateOutcome.CREATED)]

        await asyncio.gather(*map(race, keys))


async def a_lost_answer_is_no_lost_race(open: Open) -> None:
    """Half the creators never hear that they won; each key still has one who knows, and everyone knows which bytes."""
    policy = RetryPolicy(first_wait=0.001, longest_wait=0.01, burst=10_000, per_second=10_000.0)
    async with closing(open()) as mailbox:
        clock, chance = SystemClock(), random.Random(3)
        line = FaultyMailbox(mailbox, clock, chance, Faults(lost_answer=0.5, undecided=0.2, broken_read=0.2))
        patient = RetryingMailbox(line, clock, chance, policy=policy)
        bodies = [b"racer %d" % n for n in range(RACERS)]
        outcomes = await asyncio.gather(
            *(create_once(patient, clock, f"lost/{n % 4}", body) for n, body in enumerate(bodies))
        )
        for key in range(4):
            kept = await mailbox.get(f"lost/{key}")
            won = [n for n in range(key, RACERS, 4) if isinstance(outcomes[n], Won)]
            assert [bodies[n] for n in won] == [kept]
            assert {found.body for found in outcomes[key::4] if isinstance(found, Lost)} == {kept}


async def a_put_may_be_repeated(open: Open) -> None:
    async with closing(open()) as mailbox:
        for body in (b"same", b"same", b"other"):
            await mailbox.put("a", body)
            assert await mailbox.get("a") == body


async def a_reader_sees_whole_objects(open: Open) -> None:
    async with closing(open()) as writer, closing(open()) as reader:
        bodies = [bytes([n]) * 300_000 for n in range(4)]
        await writer.put("a", bodies[0])
        done = asyncio.Event()

        async def write() -> None:
            for turn in range(20):
                await writer.put("a", bodies[turn % 4])
            done.set()

        async def read() -> None:
            while not done.is_set():
                with contextlib.suppress(MailboxUnavailable):  # moto fails when an object is replaced under a reader
                    assert await reader.get("a") in bodies
                await asyncio.sleep(0)

        await asyncio.gather(write(), read(), read())
        assert await reader.get("a") == bodies[3]


async def many_may_read_at_once(open: Open) -> None:
    async with closing(open()) as mailbox:
        await mailbox.put("a", EVERY_BYTE * 100)
        assert set(await asyncio.gather(*(mailbox.get("a") for _ in range(64)))) == {EVERY_BYTE * 100}


async def a_listing_holds_what_the_prefix_says(open: Open) -> None:
    sizes = {"live/a/1": 1, "live/a/2": 2, "live/b": 3, "live-not": 4, "lively": 5, "other/live/x": 6}
    async with closing(open()) as mailbox:
        for key, size in sizes.items():
            await mailbox.put(key, b"x" * size)
        for prefix in ("", "live", "live/", "live/a", "live/a/", "live/a/2", "live/b", "live-", "nothing/", "other/l"):
            expected = {key: size for key, size in sizes.items() if key.startswith(prefix)}
            assert await listed(mailbox, prefix) == expected, prefix


async def a_listing_begins_after(open: Open) -> None:
    keys = [f"tape/{n:010d}-0" for n in range(0, 50, 5)]
    async with closing(open()) as mailbox:
        for key in random.Random(0).sample(keys, len(keys)):
            await mailbox.create(key, b"")
        for after in ("", "tape/", keys[0], keys[4], keys[4][:-1], keys[-1], "tape/0000000012", "zebra", "aardvark"):
            assert sorted(await listed(mailbox, "tape/", after)) == [key for key in keys if key > after], after


async def a_lagging_listing_hides_nothing_for_ever(open: Open) -> None:
    """In any order, with some entries late and some twice: what is listed exists, and in the end everything is."""
    keys = {f"live/{n:03d}" for n in range(12)}
    async with closing(open()) as mailbox:
        await asyncio.gather(*(mailbox.put(key, b"x") for key in keys))
        faults = Faults(unlisted=0.4, repeated=0.4)
        line = FaultyMailbox(mailbox, SystemClock(), random.Random(5), faults)
        seen, listings = set[str](), list[list[str]]()
        while seen != keys:
            listings.append([entry.key async for entry in line.list("live/")])
            seen.update(listings[-1])
            assert seen <= keys and len(listings) < 100
        assert len(listings) > 1 and any(found != sorted(found) for found in listings)


async def a_deleted_object_is_gone(open: Open) -> None:
    async with closing(open()) as mailbox:
        await mailbox.put("a/b/c", b"1")
        await mailbox.put("a/b/d", b"2")
        await mailbox.delete("a/b/c")
        assert await mailbox.get("a/b/c") is None
        assert await listed(mailbox, "a/") == {"a/b/d": 1}
        await mailbox.delete("a/b/d")
        assert await listed(mailbox, "") == {}
        assert await mailbox.create("a/b/c", b"again") is CreateOutcome.CREATED
        assert await mailbox.get("a/b/c") == b"again"


async def large_bodies_arrive_unchanged(open: Open) -> None:
    body = random.Random(1).randbytes(LARGE)
    async with closing(open()) as mailbox:
        await mailbox.put("blobs/large", body)
        assert await mailbox.get("blobs/large") == body
        assert await mailbox.get("blobs/large", limit=LARGE) == body
        assert (await listed(mailbox, "blobs/")) == {"blobs/large": LARGE}
        await mailbox.delete("blobs/large")


async def a_limit_is_kept(open: Open) -> None:
    async with closing(open()) as mailbox:
        for size in (0, 1, 10):
            await mailbox.put("a", b"x" * size)
            for limit in (size, size + 1, LARGE, 1 << 40):
                assert await mailbox.get("a", limit=limit) == b"x" * size
        for limit in (0, 9):
            with pytest.raises(PayloadTooLarge):
                await mailbox.get("a", limit=limit)
        assert await mailbox.get("missing", limit=LARGE) is None


async def odd_keys_are_kept_and_bad_ones_refused(open: Open) -> None:
    async with closing(open()) as mailbox:
        for n, key in enumerate(ODD_KEYS):
            assert await mailbox.create(key, b"x" * n) is CreateOutcome.CREATED
        assert await listed(mailbox, "") == {key: n for n, key in enumerate(ODD_KEYS)}
        for n, key in enumerate(ODD_KEYS):
            assert await mailbox.get(key) == b"x" * n
        for key in BAD_KEYS:
            for call in (mailbox.get(key), mailbox.put(key, b""), mailbox.create(key, b""), mailbox.delete(key)):
                with pytest.raises(ConfigurationError):
                    await call
        for prefix in ("/", "..", "../", ".a", "a//", "a b"):
            with pytest.raises(ConfigurationError):
                await listed(mailbox, prefix)


async def a_cancelled_call_harms_nothing(open: Open) -> None:
    body = EVERY_BYTE * 20_000
    async with closing(open()) as mailbox:
        await mailbox.put("whole", body)
        for turn in range(8):
            calls = [mailbox.put(f"cut/{turn}", body), mailbox.create(f"new/{turn}", body), mailbox.get("whole")]
            tasks = [asyncio.ensure_future(call) for call in calls]
            for _ in range(turn * 3):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert await mailbox.get("whole") == body
        for turn in range(8):
            assert await mailbox.get(f"cut/{turn}") in (None, body)
            assert await mailbox.get(f"new/{turn}") in (None, body)
        assert await mailbox.create("after", b"1") is CreateOutcome.CREATED


async def the_probe_calls_it_atomic(open: Open) -> None:
    async with closing(open()) as mailbox:
        found = await probe_store(mailbox)
        assert found.store == "atomic", found.reason
        assert await listed(mailbox, "") == {}


async def closing_twice_is_harmless(open: Open) -> None:
    mailbox = open()
    await mailbox.close()
    await mailbox.close()
    unused = open()
    assert unused.url and repr(unused)
    await unused.close()


async def a_closed_mailbox_says_so(open: Open) -> None:
    mailbox = open()
    await mailbox.put("a", b"")
    await mailbox.close()
    for call in (mailbox.get("a"), mailbox.put("a", b""), mailbox.create("b", b""), mailbox.delete("a")):
        with pytest.raises(MailboxDenied):
            await call
    with pytest.raises(MailboxDenied):
        await listed(mailbox, "")


SCENARIOS: tuple[Scenario, ...] = (
    a_missing_object_is_none,
    what_is_written_is_read,
    a_buffer_may_be_used_again,
    create_has_one_winner,
    concurrent_creates_have_one_winner,
    a_lost_answer_is_no_lost_race,
    a_put_may_be_repeated,
    a_reader_sees_whole_objects,
    many_may_read_at_once,
    a_listing_holds_what_the_prefix_says,
    a_listing_begins_after,
    a_lagging_listing_hides_nothing_for_ever,
    a_deleted_object_is_gone,
    large_bodies_arrive_unchanged,
    a_limit_is_kept,
    odd_keys_are_kept_and_bad_ones_refused,
    a_cancelled_call_harms_nothing,
    the_probe_calls_it_atomic,
    closing_twice_is_harmless,
)


@contextlib.asynccontextmanager
async def closing(mailbox: Mailbox) -> AsyncIterator[Mailbox]:
    """The mailbox, closed at the end."""
    try:
        yield mailbox
    finally:
        await mailbox.close()


async def listed(mailbox: Mailbox, prefix: str, after: str = "") -> dict[str, int]:
    """Key and size of everything listed; nothing twice."""
    entries = [entry async for entry in mailbox.list(prefix, after=after)]
    found = {entry.key: entry.size for entry in entries}
    assert len(found) == len(entries)
    return found
