"""A mailbox over any object store: keys below a prefix, answers by the one table, credentials renewed once.

A backend is a :class:`Transport`: it moves bytes and raises whatever its library raises. This class bounds
how many requests run at once, turns those errors into the contract's, and forgets their text, which may
quote credentials.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from gradientmail_core.errors import MailboxDenied, MailboxError
from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry, checked_key, checked_prefix, is_key
from gradientmail_core.mailbox.objectstore.answers import Answer, Meaning, explained, meaning
from gradientmail_core.mailbox.objectstore.credentials import CredentialSource
from gradientmail_core.mailbox.surroundings import Abandoned, Surroundings

T = TypeVar("T")


class Transport(Protocol):
    """The verbs of one backend on full paths. Each raises what its library raises; ``answer`` reads that."""

    async def get(self, path: str, limit: int | None) -> bytes:
        """The object's bytes; :class:`PayloadTooLarge`, unread, if they are more than ``limit``."""
        ...

    async def put(self, path: str, body: Body) -> None:
        """Write unconditionally, in parallel parts if that is faster."""
        ...

    async def create(self, path: str, body: Body) -> None:
        """Write in a single request that fails if the object exists."""
        ...

    def list(self, prefix: str, after: str) -> AsyncIterator[Sequence[Entry]]:
        """Pages of objects, by full path; those outside ``prefix`` or up to ``after`` may be among them."""
        ...

    async def delete(self, path: str) -> None:
        """Remove one object."""
        ...

    async def abandoned(self, prefix: str, older_than: float, remove: bool) -> Abandoned:
        """Unfinished uploads that are ``older_than`` seconds old; ``remove`` aborts them."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...

    def answer(self, error: Exception) -> Answer | None:
        """What the store answered, or None if the error is not about an answer at all."""
        ...


class ObjectMailbox:
    """The mailbox below ``prefix``, by ``transport``. ``credentials`` is None if the backend cares for itself.

    ``describe`` asks the store about itself; it blocks.
    """

    def __init__(
        self,
        transport: Transport,
        url: str,
        prefix: str,
        *,
        max_concurrency: int,
        credentials: CredentialSource | None = None,
        describe: Callable[[], Surroundings] = Surroundings,
    ) -> None:
        self._describe = describe
        self._transport = transport
        self._url = url
        self._root = f"{prefix}/" if prefix else ""
        self._slots = asyncio.Semaphore(max_concurrency)
        self._credentials = credentials
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        return self._url

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        path = self._root + checked_key(key)
        body = await self._asked_for(f"GET {key}", Meaning.MISSING, lambda: self._transport.get(path, limit))
        return None if isinstance(body, Meaning) else body

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        path = self._root + checked_key(key)
        await self._asked(f"PUT {key}", lambda: self._transport.put(path, body))

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        path = self._root + checked_key(key)
        answer = await self._asked_for(f"PUT {key}", Meaning.TAKEN, lambda: self._transport.create(path, body))
        return CreateOutcome.CREATED if answer is None else CreateOutcome.TAKEN

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`; what the store leaves in beyond that is filtered here."""
        start, behind = self._root + checked_prefix(prefix), self._root + after if after else ""
        async for page in self._pages(start, behind):
            for found in page:
                key = found.key.removeprefix(self._root)
                if found.key.startswith(start) and is_key(key) and key > after:
                    yield Entry(key, found.size, found.modified)

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`."""
        path = self._root + checked_key(key)
        await self._asked_for(f"DELETE {key}", Meaning.MISSING, lambda: self._transport.delete(path))

    async def abandoned(self, older_than: float, *, remove: bool) -> Abandoned:
        """See :class:`Littered`: uploads in parts that crashed writers left. A thousand at a call.

        Raises :class:`MailboxUnsupported` where they cannot be listed.
        """
        return await self._asked("LIST uploads", lambda: self._transport.abandoned(self._root, older_than, remove))

    async def surroundings(self) -> Surroundings:
        """See :class:`Described`."""
        await self._generation()
        return await asyncio.to_thread(self._describe)

    async def close(self) -> None:
        """Release connections. Safe to call twice."""
        if not self._closed:
            self._closed = True
            await self._transport.close()

    async def _pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[Entry]]:
        """Every page; from the first again, once, if the credentials expire on the way."""
        pages, generation = self._transport.list(prefix, after), await self._generation()
        while True:
            page = await self._answered(functools.partial(_next, pages))
            if page is None:
                return
            if not isinstance(page, Answer):
                yield page
            elif generation is not None and meaning(page) is Meaning.EXPIRED:
                await self._renew(generation)
                pages, generation = self._transport.list(prefix, after), None
            else:
                raise explained(page, f"LIST {prefix} at {self._url}")

    async def _asked(self, request: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``."""
        result = await self._renewing(work)
        if isinstance(result, Answer):
            raise explained(result, f"{request} at {self._url}")
        return result

    async def _asked_for(self, request: str, expected: Meaning, work: Callable[[], Awaitable[T]]) -> T | Meaning:
        """The result of ``work``, or ``expected`` if that is what the store's refusal means."""
        result = await self._renewing(work)
        if not isinstance(result, Answer):
            return result
        if meaning(result) is expected:
            return expected
        raise explained(result, f"{request} at {self._url}")

    async def _renewing(self, work: Callable[[], Awaitable[T]]) -> T | Answer:
        """``work``, once more with new credentials if the store says that they have expired."""
        generation = await self._generation()
        result = await self._answered(work)
        if generation is not None and isinstance(result, Answer) and meaning(result) is Meaning.EXPIRED:
            await self._renew(generation)
            result = await self._answered(work)
        return result

    async def _generation(self) -> int | None:
        """The number of the credentials a request is about to use, None if the backend has its own."""
        if self._credentials is None:
            return None
        await self._credentials.current()
        return self._credentials.generation

    async def _renew(self, refused: int) -> None:
        assert self._credentials is not None
        await self._credentials.renew(refused)

    async def _answered(self, work: Callable[[], Awaitable[T]]) -> T | Answer:
        """What the store returned or answered, when a slot was free."""
        if self._closed:
            raise MailboxDenied(f"The mailbox {self._url} is closed.")
        async with self._slots:
            try:
                return await work()
            except MailboxError:
                raise
            except Exception as error:
                answer = self._transport.answer(error)
                if answer is None:
                    raise
                return answer


async def _next(pages: AsyncIterator[Sequence[Entry]]) -> Sequence[Entry] | None:
    return await anext(pages, None)
