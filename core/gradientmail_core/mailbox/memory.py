"""A mailbox in this process's memory, for tests, notebooks and simulations.

Every operation is one step under one lock, so it is atomic among threads and event loops alike. Bodies
are copied on the way in: a caller may reuse its buffer as soon as the call returns.
"""

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable

from gradientmail_core.errors import PayloadTooLarge
from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry, Page, checked_key, checked_prefix

_AFTER_EVERY_KEY = "\x7f"  # greater than any character of a key


class MemoryMailbox:
    """Objects in a dictionary, with their keys kept sorted so that a listing costs what it returns.

    ``now`` is the store's clock, in seconds since 1970.
    """

    def __init__(self, name: str = "", now: Callable[[], float] = time.time) -> None:
        self._name = name
        self._now = now
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._keys: list[str] = []
        self._listing: Page = []  # of each key, in their order

    def __repr__(self) -> str:
        return f"MemoryMailbox({self._name!r})"

    @property
    def url(self) -> str:
        """``memory://name``; mailboxes opened by the same URL share their objects."""
        return f"memory://{self._name}"

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        body = self._objects.get(checked_key(key))
        if body is not None and limit is not None and len(body) > limit:
            raise PayloadTooLarge(f"{key} has {len(body)} bytes, more than the {limit} expected of it.")
        return body

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        self._store(checked_key(key), bytes(body), replace=True)

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        stored = self._store(checked_key(key), bytes(body), replace=False)
        return CreateOutcome.CREATED if stored else CreateOutcome.TAKEN

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`; the entries are those of one instant, in key order."""
        for entry in self._entries(checked_prefix(prefix), after):
            yield entry

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`."""
        with self._lock:
            if self._objects.pop(checked_key(key), None) is not None:
                place = bisect_left(self._keys, key)
                del self._keys[place], self._listing[place]

    async def close(self) -> None:
        """Nothing to release: the objects live as long as the mailbox."""

    def _store(self, key: str, body: bytes, *, replace: bool) -> bool:
        with self._lock:
            known = key in self._objects
            if known and not replace:
                return False
            place = bisect_left(self._keys, key)
            self._keys[place : place + known] = [key]
            self._listing[place : place + known] = [Entry(key, len(body), self._now())]
            self._objects[key] = body
            return True

    def _entries(self, prefix: str, after: str) -> Page:
        with self._lock:
            start = max(bisect_left(self._keys, prefix), bisect_right(self._keys, after))
            stop = bisect_left(self._keys, prefix + _AFTER_EVERY_KEY)
            return self._listing[start:stop]
