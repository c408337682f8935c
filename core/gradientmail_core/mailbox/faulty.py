"""A mailbox that fails in every way a store and the line to it can, from a seed, on the injected clock.

What is drawn depends on the seed and the order of calls only, so a failing run can be played again. The
faults stay within what the contract allows: a reader never gets a part of an object, because every
mailbox compares the length it received; a read that breaks off is a :class:`MailboxUnavailable`.

A write can land although its caller was told nothing, and it can land *later*, long after the caller
gave up: that is what a frozen process or a slow proxy does, and what a protocol is most easily wrong about.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from gradientmail_core.clock import Clock
from gradientmail_core.errors import MailboxUnavailable
from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry, Mailbox

T = TypeVar("T")

Fault: TypeAlias = Literal[
    "unavailable", "time_out", "undecided", "lost_answer", "late_write", "broken_read", "missing_read", "slow"
]

_BEFORE_ANY_CALL: tuple[Fault, ...] = ("unavailable", "time_out", "slow")
_OF_WRITES: tuple[Fault, ...] = (*_BEFORE_ANY_CALL, "lost_answer", "late_write")
_OF_CREATES: tuple[Fault, ...] = (*_OF_WRITES, "undecided")
_OF_READS: tuple[Fault, ...] = (*_BEFORE_ANY_CALL, "broken_read", "missing_read")
_OF_LISTS: tuple[Fault, ...] = (*_BEFORE_ANY_CALL, "broken_read")


@dataclass(frozen=True, slots=True)
class Faults:
    """Probability of each fault per call, 0 to 1, and times in seconds.

    ``unavailable``  refused at once (503, reset); nothing was done
    ``time_out``     ``patience`` seconds of silence; nothing was done
    ``undecided``    a create answered 409: the store does not say who won, and did not take this one
    ``lost_answer``  the write is done, the caller hears of a fault
    ``late_write``   the caller hears of a fault; the write is done up to ``lateness`` seconds later
    ``broken_read``  the body or listing ends early, which every mailbox notices
    ``missing_read`` an object that exists is not found
    ``slow``         the call takes up to ``slowness`` seconds more
    ``repeated``     of each entry of a listing, to be listed twice
    ``unlisted``     of each entry of a listing, to be left out
    ``outages``      spans of the clock (from, to) in which every call is refused
    """

    unavailable: float = 0.0
    time_out: float = 0.0
    undecided: float = 0.0
    lost_answer: float = 0.0
    late_write: float = 0.0
    broken_read: float = 0.0
    missing_read: float = 0.0
    slow: float = 0.0
    repeated: float = 0.0
    unlisted: float = 0.0
    outages: tuple[tuple[float, float], ...] = ()
    patience: float = 30.0
    lateness: float = 60.0
    slowness: float = 5.0


class FaultyMailbox:
    """Calls of ``inner`` with ``faults`` drawn from ``random``. ``partitioned`` cuts this node off while it is set."""

    def __init__(self, inner: Mailbox, clock: Clock, random: random.Random, faults: Faults) -> None:
        self._inner = inner
        self._clock = clock
        self._random = random
        self._faults = faults
        self._late: set[asyncio.Task[None]] = set()
        self.partitioned = False

    def __repr__(self) -> str:
        return f"FaultyMailbox({self._inner!r}, {self._faults!r})"

    @property
    def url(self) -> str:
        """The inner mailbox's."""
        return self._inner.url

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        fault = await self._drawn(_OF_READS)
        body = await self._inner.get(key, limit=limit)
        if fault == "broken_read":
            raise MailboxUnavailable("The body ended early.")
        return None if fault == "missing_read" else body

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        kept = bytes(body)
        await self._write(_OF_WRITES, lambda: self._inner.put(key, kept))

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        kept = bytes(body)
        return await self._write(_OF_CREATES, lambda: self._inner.create(key, kept))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`; shuffled, as no order is promised."""
        fault = await self._drawn(_OF_LISTS)
        entries = [entry async for entry in self._inner.list(prefix, after=after)]
        entries += [entry for entry in entries if self._chance(self._faults.repeated)]
        self._random.shuffle(entries)
        end = self._random.randrange(len(entries) + 1) if fault == "broken_read" else len(entries)
        for entry in entries[:end]:
            if not self._chance(self._faults.unlisted):
                yield entry
        if fault == "broken_read":
            raise MailboxUnavailable("The listing ended early.")

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`."""
        await self._write(_OF_WRITES, lambda: self._inner.delete(key))

    async def close(self) -> None:
        """Forget late writes that have not landed, and close the inner mailbox."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._inner.close()

    async def _write(self, possible: tuple[Fault, ...], work: Callable[[], Awaitable[T]]) -> T:
        fault = await self._drawn(possible)
        if fault == "late_write":
            self._schedule(work, self._random.uniform(0.0, self._faults.lateness))
            raise MailboxUnavailable("The connection was reset.")
        if fault == "undecided":
            raise MailboxUnavailable("409 ConditionalRequestConflict: another write is in flight.")
        result = await work()
        if fault == "lost_answer":
            raise MailboxUnavailable("The connection was reset.")
        return result

    async def _drawn(self, possible: tuple[Fault, ...]) -> Fault | None:
        """At most one fault for a call, drawn before it; faults before the call happen here."""
        point, fault = self._random.random(), None
        for candidate in possible:
            probability: float = getattr(self._faults, candidate)
            if fault is None and point < probability:
                fault = candidate
            point -= probability
        now = self._clock.now()
        if self.partitioned or any(start <= now < end for start, end in self._faults.outages):
            raise MailboxUnavailable("No route to the store.")
        if fault == "slow":
            await self._clock.sleep(self._random.uniform(0.0, self._faults.slowness))
        if fault == "time_out":
            await self._clock.sleep(self._faults.patience)
        if fault in ("unavailable", "time_out"):
            raise MailboxUnavailable("503 Slow Down." if fault == "unavailable" else "No answer.")
        return fault

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _schedule(self, work: Callable[[], Awaitable[object]], seconds: float) -> None:
        async def land() -> None:
            await self._clock.sleep(seconds)
            await work()

        task = asyncio.ensure_future(land())
        self._late.add(task)
        task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()
