"""The mailbox: five operations on small keys, the only thing nodes share.

What an implementation promises, and the protocol leans on:

* An object appears whole or not at all; a reader never sees a part of a write in progress.
* ``create`` has at most one winner per key among all processes. ``Created`` means this call's bytes
  are there, ``Taken`` that an object was there already. An outcome that the store did not settle
  (time-out, reset, 409) raises :class:`MailboxUnavailable`. Client libraries may send a request twice
  when a connection breaks, so the object may be this call's own: whoever cares retries the same bytes
  and compares what it reads back, and a lost answer is never mistaken for a lost race.
* ``put`` may be repeated: only content-addressed keys are written with it.
* ``list`` may lag and comes in no promised order; absence in a listing or a ``None`` from ``get``
  proves nothing.
* Keys are ``/``-separated segments of ``[A-Za-z0-9._-]`` (see :func:`checked_key`), so a key can never
  leave the prefix. A stranger's object under another name is not listed.
* A key is not also the directory of others: ``a`` and ``a/b`` never live side by side.

Passing faults raise :class:`MailboxUnavailable`, lasting ones :class:`MailboxDenied`.
"""

import enum
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from gradientmail_core.errors import ConfigurationError, MailboxUnavailable

Body: TypeAlias = bytes | bytearray | memoryview

StoreClass: TypeAlias = Literal["atomic", "racy", "none"]
"""What a store's ``create`` is worth: one winner always; one except under a race; no condition at all."""

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\Z")


class CreateOutcome(enum.Enum):
    """How a settled create ended."""

    CREATED = "created"
    TAKEN = "taken"


class MailboxThrottled(MailboxUnavailable):
    """The store asks to come back in ``seconds``."""

    def __init__(self, cause: str, seconds: float) -> None:
        super().__init__(cause)
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing: its key below the mailbox's prefix and its size in bytes.

    ``modified`` is when it was written, in seconds since 1970 by the store's own clock, or None if the store does not
    say. No node of a run reads it; it is for people, and for removing what nobody has touched for long.
    """

    key: str
    size: int
    modified: float | None = field(default=None, compare=False)


Page: TypeAlias = list[Entry]


class Mailbox(Protocol):
    """An object store under one prefix. All methods may be called concurrently on one event loop."""

    @property
    def url(self) -> str:
        """Where this mailbox is, without credentials."""
        ...

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """The object's bytes, or None if it was not found.

        ``limit`` bounds what is read: a larger object raises :class:`PayloadTooLarge` unread.
        """
        ...

    async def put(self, key: str, body: Body) -> None:
        """Write an object whose key fixes its content; repeating it is harmless."""
        ...

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """Write a small object only if there is none at ``key``; atomic among all processes."""
        ...

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """Every object whose key starts with ``prefix`` and is greater than ``after``, in any order."""
        ...

    async def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""
        ...

    async def close(self) -> None:
        """Release connections and threads. Safe to call twice."""
        ...


@runtime_checkable
class ListsWhole(Protocol):
    """A mailbox that has read a listing to its end before it gives out the first entry."""

    async def whole(self, prefix: str, *, after: str = "") -> Sequence[Entry]:
        """All that :meth:`Mailbox.list` gives out, at once."""
        ...


async def whole_listing(mailbox: Mailbox, prefix: str, *, after: str = "") -> Sequence[Entry]:
    """Every object whose key starts with ``prefix`` and is greater than ``after``, in any order."""
    if isinstance(mailbox, ListsWhole):
        return await mailbox.whole(prefix, after=after)
    return [entry async for entry in mailbox.list(prefix, after=after)]


def checked_key(key: str) -> str:
    """``key`` itself, or :class:`ConfigurationError` if a segment could leave the prefix or confuse a store."""
    if not is_key(key):
        raise ConfigurationError(
            f"The key {key[:80]!r} is not made of segments of letters, digits, '.', '_' and '-'.",
            "Use such names for prefixes and node ids.",
        )
    return key


def checked_prefix(prefix: str) -> str:
    """``prefix`` itself if some key could start with it, else :class:`ConfigurationError`."""
    return prefix if not prefix or is_key(prefix + "0") else checked_key(prefix)


@lru_cache(maxsize=4096)
def is_key(key: str) -> bool:
    """Whether a listed name is a key at all, or a stranger's object to pass over."""
    return len(key) <= 512 and all(map(_SEGMENT.match, key.split("/")))
