"""Outages as waiting: passing faults are repeated until the store answers.

Every request has a deadline, because a connection can fall silent for ever. What fails with
:class:`MailboxUnavailable` is sent again, unchanged, after a wait that doubles with each attempt and is
drawn at random so that nodes do not return in step. All requests of a node share one budget of retries:
a store that is down for a minute sees about ``burst + 60 * per_second`` of them, however many requests
wait. There is no last attempt, because only the protocol knows when a silence means giving up; the owner
is told of it instead.

Lasting faults and the contract's own answers pass through. A create that is repeated may find its own
object; see :mod:`gradientmail_core.mailbox.base`.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from gradientmail_core.clock import Clock, TimeOver
from gradientmail_core.errors import MailboxUnavailable
from gradientmail_core.events import StoreStalled
from gradientmail_core.mailbox.base import (
    Body,
    CreateOutcome,
    Entry,
    ListsWhole,
    Mailbox,
    MailboxThrottled,
    Page,
)

T = TypeVar("T")

UNBOUNDED_READ = 1 << 30  # bytes: the deadline of a get without a limit
REPORT_MOST_SECONDS = 60.0
CLOSE_SECONDS = 10.0
DOUBLINGS_MOST = 4


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Deadlines and waits, in seconds.

    ``slowest``, in bytes per second, extends the deadline of large bodies. A deadline doubles with every attempt
    that missed it, so a line slower than that only costs time.
    """

    deadline: float = 30.0
    slowest: float = 1e6
    first_wait: float = 0.2
    longest_wait: float = 15.0
    burst: int = 10
    per_second: float = 1.0
    report_after: float = 10.0


class DeadlineMissed(MailboxUnavailable):
    """The store was silent; a line slower than expected looks the same."""


class RetryBudget:
    """When the next retry of a node may start, and when its owner hears of the silence."""

    def __init__(
        self, clock: Clock, random: random.Random, policy: RetryPolicy, emit: Callable[[StoreStalled], None]
    ) -> None:
        self._clock = clock
        self._random = random
        self._policy = policy
        self._emit = emit
        self._spent_until = clock.now()
        self._silent_since: float | None = None
        self._report_at = policy.report_after

    def succeeded(self) -> None:
        """The store answered."""
        self._silent_since = None
        self._report_at = self._policy.report_after

    def wait_after(self, error: MailboxUnavailable, attempt: int) -> float:
        """Seconds until a request may be sent again that ended in ``error`` after ``attempt`` earlier failures."""
        self._report(error)
        asked = error.seconds if isinstance(error, MailboxThrottled) else 0.0
        return max(self._backoff(attempt), self._turn(), asked)

    def _backoff(self, attempt: int) -> float:
        wait = min(self._policy.longest_wait, self._policy.first_wait * 2.0 ** min(attempt, 30))
        return wait * self._random.uniform(0.5, 1.0)

    def _turn(self) -> float:
        """Reserve one retry: ``burst`` of them at once, then one every ``1 / per_second`` seconds."""
        now, interval = self._clock.now(), 1.0 / self._policy.per_second
        start = max(now, self._spent_until - (self._policy.burst - 1) * interval)
        self._spent_until = max(now, self._spent_until) + interval
        return start - now

    def _report(self, error: MailboxUnavailable) -> None:
        now = self._clock.now()
        if self._silent_since is None:
            self._silent_since = now
        silence = now - self._silent_since
        if silence >= self._report_at:
            self._report_at = silence + min(silence, REPORT_MOST_SECONDS)
            self._emit(StoreStalled(silence, error.cause))


async def within(clock: Clock, seconds: float, work: Awaitable[T]) -> T:
    """The result of ``work``, or :class:`DeadlineMissed` after ``seconds`` on ``clock``; it is cancelled then."""
    try:
        return await clock.within(seconds, work)
    except TimeOver:
        raise DeadlineMissed(f"No answer within {seconds:.0f} s.") from None


def _heard(request: "asyncio.Future[T]") -> None:
    """Take note of an abandoned request's error, so that nothing is logged about it."""
    if not request.cancelled():
        request.exception()


class RetryingMailbox:
    """Repeats what fails in passing; ``emit`` is told when the store has been silent for long."""

    def __init__(
        self,
        inner: Mailbox,
        clock: Clock,
        random: random.Random,
        emit: Callable[[StoreStalled], None] = lambda event: None,
        policy: RetryPolicy | None = None,
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._policy = policy or RetryPolicy()
        self._budget = RetryBudget(clock, random, self._policy, emit)

    def __repr__(self) -> str:
        return f"RetryingMailbox({self._inner!r})"

    @property
    def url(self) -> str:
        """The inner mailbox's."""
        return self._inner.url

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        size = UNBOUNDED_READ if limit is None else limit
        return await self._repeated(size, lambda: self._inner.get(key, limit=limit))

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        await self._repeated(memoryview(body).nbytes, lambda: self._inner.put(key, body))

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        return await self._repeated(memoryview(body).nbytes, lambda: self._inner.create(key, body))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`; the listing is read to its end before the first entry is given out."""
        for entry in await self.whole(prefix, after=after):
            yield entry

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`."""
        await self._repeated(0, lambda: self._inner.delete(key))

    async def close(self) -> None:
        """Close the inner mailbox; one that does not answer is left after some seconds."""
        with suppress(TimeOver):
            await self._clock.within(CLOSE_SECONDS, self._inner.close())

    async def _repeated(self, size: int, request: Callable[[], Awaitable[T]]) -> T:
        """The answer to ``request``, which moves at most ``size`` bytes, however long it takes."""
        deadline = self._policy.deadline + size / self._policy.slowest
        return await self._answered(lambda missed: within(self._clock, deadline * 2.0**missed, request()))

    async def _answered(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """Repeat ``attempt``, which is told how many deadlines were missed, until it is settled."""
        missed = 0
        for failures in itertools.count():
            try:
                answer = await attempt(missed)
            except MailboxUnavailable as error:
                missed = min(missed + isinstance(error, DeadlineMissed), DOUBLINGS_MOST)
                await self._clock.sleep(self._budget.wait_after(error, failures))
            else:
                if failures:
                    self._budget.succeeded()
                return answer
        raise AssertionError("unreachable")

    async def whole(self, prefix: str, *, after: str = "") -> tuple[Entry, ...]:
        """See :meth:`ListsWhole.whole`."""
        return await self._answered(lambda missed: self._collected(prefix, after))

    async def _collected(self, prefix: str, after: str) -> tuple[Entry, ...]:
        """The whole listing. Only a silence of one deadline ends it, since it may have any number of pages."""
        entries: Page = []
        collecting = asyncio.ensure_future(self._collect(prefix, after, entries))
        try:
            while not collecting.done():
                seen = len(entries)
                timer = asyncio.ensure_future(self._clock.sleep(self._policy.deadline))
                await asyncio.wait((collecting, timer), return_when=asyncio.FIRST_COMPLETED)
                timer.cancel()
                if not collecting.done() and len(entries) == seen:
                    raise DeadlineMissed(f"No answer to a listing within {self._policy.deadline:.0f} s.")
            collecting.result()
            return tuple(entries)
        finally:
            collecting.cancel()
            collecting.add_done_callback(_heard)

    async def _collect(self, prefix: str, after: str, into: Page) -> None:
        if isinstance(self._inner, ListsWhole):
            into.extend(await self._inner.whole(prefix, after=after))
            return
        async for entry in self._inner.list(prefix, after=after):
            into.append(entry)
