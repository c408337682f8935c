"""What the memory mailbox adds to the contract: several threads, each with a loop of its own."""

import asyncio
import threading

from gradientmail_core.mailbox import CreateOutcome, MemoryMailbox

THREADS, KEYS = 8, 200


def test_threads_race_for_keys_and_one_wins_each() -> None:
    mailbox, won, start = MemoryMailbox("race"), list[tuple[int, int]](), threading.Barrier(THREADS)

    def race(thread: int) -> None:
        async def work() -> None:
            for key in range(KEYS):
                if await mailbox.create(f"k/{key:03d}", b"%d" % thread) is CreateOutcome.CREATED:
                    won.append((key, thread))

        start.wait()
        asyncio.run(work())

    threads = [threading.Thread(target=race, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def read() -> list[bytes | None]:
        return [await mailbox.get(f"k/{key:03d}") for key, _ in sorted(won)]

    assert [key for key, _ in sorted(won)] == list(range(KEYS))
    assert asyncio.run(read()) == [b"%d" % thread for _, thread in sorted(won)]


def test_entries_are_those_of_one_instant_in_order() -> None:
    async def work() -> None:
        mailbox = MemoryMailbox()
        for n in range(9, -1, -1):
            await mailbox.put(f"k/{n}", b"")
        seen = []
        async for entry in mailbox.list("k/"):
            await mailbox.delete(f"k/{9 - int(entry.key[-1])}")
            seen.append(entry.key)
        assert seen == [f"k/{n}" for n in range(10)]
        assert [entry async for entry in mailbox.list("")] == []

    asyncio.run(work())


def test_url_and_repr_name_it() -> None:
    assert MemoryMailbox("x").url == "memory://x"
    assert repr(MemoryMailbox("x")) == "MemoryMailbox('x')"
