"""The mailbox over a transport: how many requests at once, when credentials are renewed, what is filtered."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from gradientmail_core.errors import MailboxDenied, MailboxUnavailable, PayloadTooLarge
from gradientmail_core.mailbox import CreateOutcome, Entry
from gradientmail_core.mailbox.base import Body
from gradientmail_core.mailbox.objectstore import Credentials
from gradientmail_core.mailbox.objectstore.answers import Answer
from gradientmail_core.mailbox.objectstore.credentials import CredentialSource
from gradientmail_core.mailbox.objectstore.objects import ObjectMailbox
from gradientmail_core.mailbox.surroundings import Abandoned


class Refused(Exception):
    """What the library under test would raise."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("secret words")
        self.answer = answer


class Library:
    """A transport that asks ``answer`` before each verb what to raise, if anything."""

    def __init__(self, answer: Callable[[str], Exception | None] = lambda verb: None) -> None:
        self._answer = answer
        self.running = self.most = self.closed = 0
        self.pages: list[list[Entry]] = []

    async def _meet(self, verb: str) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        if error := self._answer(verb):
            raise error

    async def get(self, path: str, limit: int | None) -> bytes:
        await self._meet(f"get {path}")
        return b"body"

    async def put(self, path: str, body: Body) -> None:
        await self._meet(f"put {path}")

    async def create(self, path: str, body: Body) -> None:
        await self._meet(f"create {path}")

    async def list(self, prefix: str, after: str) -> AsyncIterator[Sequence[Entry]]:
        for page in self.pages:
            await self._meet(f"list {prefix} {after}")
            yield page

    async def delete(self, path: str) -> None:
        await self._meet(f"delete {path}")

    async def abandoned(self, prefix: str, older_than: float, remove: bool) -> Abandoned:
        return Abandoned(3, 30)

    async def close(self) -> None:
        self.closed += 1

    def answer(self, error: Exception) -> Answer | None:
        return error.answer if isinstance(error, Refused) else None


def over(
    library: Library, prefix: str = "run", at_once: int = 16, source: CredentialSource | None = None
) -> ObjectMailbox:
    return ObjectMailbox(library, "s3://bucket/run", prefix, max_concurrency=at_once, credentials=source)


def refusing(answer: Answer) -> Library:
    return Library(lambda verb: Refused(answer))


def test_refusals_that_are_results() -> None:
    async def work() -> None:
        missing, taken = over(refusing(Answer(404))), over(refusing(Answer(412)))
        assert await missing.get("a") is None
        await missing.delete("a")
        assert await taken.create("a", b"") is CreateOutcome.TAKEN
        assert await over(Library()).create("a", b"") is CreateOutcome.CREATED

    asyncio.run(work())


def test_refusals_that_are_errors() -> None:
    async def work() -> None:
        for call in (over(refusing(Answer(404))).put("a", b""), over(refusing(Answer(404))).create("a", b"")):
            with pytest.raises(MailboxDenied):
                await call
        for call in (over(refusing(Answer(412))).put("a", b""), over(refusing(Answer(412))).delete("a")):
            with pytest.raises(MailboxDenied):
                await call
        with pytest.raises(MailboxUnavailable) as caught:
            await over(refusing(Answer(503, "SlowDown"))).get("a")
        assert "GET a at s3://bucket/run" in caught.value.cause
        assert caught.value.__cause__ is None and caught.value.__context__ is None, "the words must not be shown"

    asyncio.run(work())


def test_what_is_no_answer_passes_through() -> None:
    for error in (PayloadTooLarge("long"), ValueError("a bug")):
        with pytest.raises(type(error)):
            asyncio.run(over(Library(lambda verb, error=error: error)).get("a"))  # type: ignore[misc]  # bound as it is called


def test_only_so_many_requests_at_once() -> None:
    library = Library()

    async def work() -> None:
        mailbox = over(library, at_once=3)
        await asyncio.gather(*(mailbox.get(f"k/{n}") for n in range(20)))

    asyncio.run(work())
    assert library.most == 3


def test_keys_are_below_the_prefix_and_strangers_are_passed_over() -> None:
    asked: list[str] = []
    library = Library(lambda verb: asked.append(verb))
    library.pages = [
        [Entry("run/live/b", 1), Entry("run/live/a", 2), Entry("runner/live/c", 3)],
        [],
        [
            Entry("run/live//x", 4),
            Entry("run/live/../y", 5),
            Entry("run/live/", 6),
            Entry("run/other", 7),
            Entry("z", 8),
        ],
        [Entry("run/live/c", 9)],
    ]

    async def work() -> None:
        mailbox = over(library)
        found = [entry async for entry in mailbox.list("live/", after="live/a")]
        assert found == [Entry("live/b", 1), Entry("live/c", 9)]
        await mailbox.get("x")
        assert [entry.key async for entry in over(library, "").list("run/live/")] == [
            "run/live/b",
            "run/live/a",
            "run/live/c",
        ]

    asyncio.run(work())
    assert asked[0] == "list run/live/ run/live/a"
    assert "get run/x" in asked


class Keys:
    """A provider that counts, and a library that refuses all but its newest keys, then everything after ``good``."""

    def __init__(self, good_from: int) -> None:
        self.asked = 0
        self._good_from = good_from

    def provide(self) -> Credentials:
        self.asked += 1
        return Credentials(str(self.asked), "x")

    def refuse(self, verb: str) -> Exception | None:
        return None if self.asked >= self._good_from else Refused(Answer(400, "ExpiredToken"))


def test_expired_credentials_are_renewed_once_and_the_request_repeated() -> None:
    keys = Keys(good_from=2)

    async def work() -> None:
        mailbox = over(Library(keys.refuse), source=CredentialSource(keys.provide))
        assert await asyncio.gather(*(mailbox.get(f"k/{n}") for n in range(16))) == [b"body"] * 16

    asyncio.run(work())
    assert keys.asked == 2


def test_credentials_that_expire_during_a_listing() -> None:
    keys = Keys(good_from=1)
    calls = iter([None, Refused(Answer(403, "ExpiredToken")), None, None])
    library = Library(lambda verb: next(calls))
    library.pages = [[Entry("run/a", 1)], [Entry("run/b", 2)]]

    async def work() -> None:
        mailbox = over(library, source=CredentialSource(keys.provide))
        assert {entry.key async for entry in mailbox.list("")} == {"a", "b"}

    asyncio.run(work())
    assert keys.asked == 2


def test_credentials_that_stay_expired_are_lasting() -> None:
    keys = Keys(good_from=99)

    async def work() -> None:
        library = Library(keys.refuse)
        library.pages = [[]]
        mailbox = over(library, source=CredentialSource(keys.provide))
        with pytest.raises(MailboxDenied, match="expired"):
            await mailbox.put("a", b"")
        with pytest.raises(MailboxDenied, match="expired"):
            _ = [entry async for entry in mailbox.list("")]
        with pytest.raises(MailboxDenied, match="expired"):
            await over(library).put("a", b"")

    asyncio.run(work())


def test_closing() -> None:
    library = Library()

    async def work() -> None:
        mailbox = over(library)
        assert await mailbox.abandoned(0, remove=False) == Abandoned(3, 30)
        await mailbox.close()
        await mailbox.close()
        with pytest.raises(MailboxDenied, match="closed"):
            await mailbox.get("a")

    asyncio.run(work())
    assert library.closed == 1
