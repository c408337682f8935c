"""A store in virtual time: requests take time, answers may be lost, and everything is seeded.

Wraps a :class:`MemoryMailbox` for one node. Latency is drawn for every request and bandwidth is the node's
own. A fault either loses the request before it takes effect or its answer after; the caller sees the same
:class:`MailboxUnavailable` and cannot tell which, as with a real store. A write may be late: its caller is told
that it failed, or is dead by then, and it lands all the same, seconds later. Requests of different nodes overtake
each other. What the mailbox contract allows may all happen: a create left undecided (409), a node told to slow down
(429, 503), silence, an object not found for once, a listing that misses some entries and repeats others.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradientmail_core.clock import Clock
from gradientmail_core.errors import MailboxUnavailable
from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry, MailboxThrottled, whole_listing
from gradientmail_core.mailbox.memory import MemoryMailbox

LATE_SECONDS = 15.0
SILENT_SECONDS = 10.0
THROTTLED_SECONDS = 1.0
LARGE_BYTES = 1 << 16
PAGE_KEYS = 1000  # an answer to a LIST request holds no more
UP, DOWN = 0, 1


@dataclass(frozen=True, slots=True)
class Weather:
    """How a node's way to the store behaves: seconds, bytes per second, and chances per request.

    ``request_lost`` is a request without effect, ``answer_lost`` an effect of which the caller does not hear,
    ``write_late`` one that comes seconds later; ``undecided`` a create answered 409, ``throttled`` a request
    refused for a second, ``silent`` one never answered, ``unfound`` a get that misses an object. Listings come in key
    order if ``ordered``, as those of most stores do.
    """

    latency: float = 0.01
    bandwidth: float = 1e8
    request_lost: float = 0.0
    answer_lost: float = 0.0
    write_late: float = 0.0
    listing_lags: float = 0.0
    undecided: float = 0.0
    throttled: float = 0.0
    silent: float = 0.0
    unfound: float = 0.0
    ordered: bool = False

    def calm(self) -> "Weather":
        """The same line without faults."""
        return Weather(self.latency, self.bandwidth, ordered=self.ordered)


@dataclass(slots=True)
class Traffic:
    """What a node asked of the store: requests by kind, and body bytes."""

    gets: int = 0
    puts: int = 0
    lists: int = 0
    deletes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def requests(self) -> int:
        """All requests."""
        return self.gets + self.puts + self.lists + self.deletes

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))


class SharedStore(MemoryMailbox):
    """The store itself.

    ``wrote`` hears of every object that appears or is replaced, ``removing`` of the first request to remove one, as it
    is made. A create may be held back on its way. It lands seconds later, or at the worst moment: just before the next
    create of the same key.
    """

    def __init__(
        self,
        name: str = "",
        wrote: Callable[[str, bytes], None] = lambda key, body: None,
        removing: Callable[[str], None] = lambda key: None,
    ) -> None:
        super().__init__(name)
        self._wrote = wrote
        self._removing = removing
        self._unwanted: set[str] = set()
        self._held: dict[str, bytes] = {}

    def hold(self, key: str, body: bytes) -> None:
        """Keep a create on its way."""
        self._held[key] = body

    async def release(self, key: str) -> None:
        """Let a held create land."""
        if key in self._held:
            await self.create(key, self._held.pop(key))

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        await super().put(key, body)
        self._wrote(key, bytes(body))

    async def whole(self, prefix: str, *, after: str = "") -> Sequence[Entry]:
        """See :meth:`ListsWhole.whole`."""
        return self._entries(prefix, after)

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        await self.release(key)
        outcome = await super().create(key, body)
        if outcome is CreateOutcome.CREATED:
            self._wrote(key, bytes(body))
        return outcome

    def unwanted(self, key: str) -> None:
        """A node decided to remove an object; its request is on the way."""
        if key not in self._unwanted:
            self._unwanted.add(key)
            self._removing(key)


class SimulatedStore:
    """One node's connection to a shared memory mailbox.

    ``up`` False is an outage or a partition. ``cut``, once set, is called when the next commit is on its way, and that
    commit is held back: what a process leaves that dies while it commits. ``size`` says how many bytes an object
    stands for, so that a toy model's payloads can weigh what a real one's would.
    """

    def __init__(
        self,
        inner: MemoryMailbox,
        clock: Clock,
        seed: int,
        weather: Weather | None = None,
        size: Callable[[str, int], int] = lambda key, length: length,
    ) -> None:
        self._inner = inner
        self._size = size
        self._clock = clock
        self._random = random.Random(seed)
        self.weather = weather or Weather()
        self.up = True
        self.traffic = Traffic()
        self.cut: Callable[[], None] | None = None
        self._free_at = [0.0, 0.0]
        self._landing: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The shared mailbox's."""
        return self._inner.url

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        self.traffic.gets += 1
        await self._request()
        body = await self._inner.get(key, limit=limit)
        if self.weather.unfound and self._random.random() < self.weather.unfound:
            body = None
        size = self._size(key, len(body)) if body else 0
        self.traffic.bytes_down += size
        await self._answer(size)
        return body

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        content = bytes(body)
        self.traffic.puts += 1
        self.traffic.bytes_up += (size := self._size(key, len(content)))
        await self._request(size)
        if self._random.random() < self.weather.write_late:
            await self._late(lambda: self._inner.put(key, content))
        await self._inner.put(key, content)
        await self._answer()

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        content = bytes(body)
        self.traffic.puts += 1
        self.traffic.bytes_up += (size := self._size(key, len(content)))
        await self._request(size)
        if self.cut is not None and key.startswith("tape/") and isinstance(self._inner, SharedStore):
            cut, self.cut = self.cut, None
            cut()
            self._inner.hold(key, content)
            await self._late(partial(self._inner.release, key))
        if self._random.random() < self.weather.write_late:
            await self._late(lambda: self._inner.create(key, content))
        if self.weather.undecided and self._random.random() < self.weather.undecided:
            raise MailboxUnavailable("The simulated store left a create undecided (409).")
        outcome = await self._inner.create(key, content)
        await self._answer()
        return outcome

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`."""
        for entry in await self.whole(prefix, after=after):
            yield entry

    async def whole(self, prefix: str, *, after: str = "") -> Sequence[Entry]:
        """See :meth:`ListsWhole.whole`; a lagging listing misses some entries and repeats others; order is random."""
        self.traffic.lists += 1
        await self._request()
        entries = await whole_listing(self._inner, prefix, after=after)
        self.traffic.lists += max(len(entries) - 1, 0) // PAGE_KEYS
        if self._random.random() < self.weather.listing_lags:
            entries = [entry for entry in entries for _ in range(self._random.choices((0, 1, 2), (2, 7, 1))[0])]
        if not self.weather.ordered:
            entries = list(entries)
            self._random.shuffle(entries)
        await self._answer()
        return entries

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`."""
        self.traffic.deletes += 1
        if isinstance(self._inner, SharedStore):
            self._inner.unwanted(key)
        await self._request()
        await self._inner.delete(key)
        await self._answer()

    async def close(self) -> None:
        """Nothing to release."""

    async def _late(self, write: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Let the write land later, whatever becomes of its caller, who is told that it failed."""

        async def landing() -> None:
            await asyncio.sleep(self._random.uniform(0.1, LATE_SECONDS))
            await write()

        self._landing.add(task := asyncio.ensure_future(landing()))
        task.add_done_callback(self._landing.discard)
        raise MailboxUnavailable("The simulated store did not say whether it took the write.")

    async def _request(self, size: int = 0) -> None:
        weather = self.weather
        await self._clock.sleep(self._random.expovariate(2 / weather.latency) + self._transfer(size, UP))
        chance = self._random.random()
        if not self.up or chance < weather.request_lost:
            raise MailboxUnavailable("The simulated store did not get the request.")
        if chance > 1.0 - weather.throttled:
            raise MailboxThrottled("The simulated store asks to slow down.", THROTTLED_SECONDS)
        if weather.silent and self._random.random() < weather.silent:
            await self._clock.sleep(SILENT_SECONDS)

    async def _answer(self, size: int = 0) -> None:
        weather = self.weather
        await self._clock.sleep(self._random.expovariate(2 / weather.latency) + self._transfer(size, DOWN))
        if not self.up or self._random.random() < weather.answer_lost:
            raise MailboxUnavailable("The simulated store's answer was lost.")

    def _transfer(self, size: int, way: int) -> float:
        """Seconds until a body has passed. Large ones of one way follow each other; small ones slip in between."""
        seconds = size / self.weather.bandwidth
        if size < LARGE_BYTES:
            return seconds
        now = self._clock.now()
        self._free_at[way] = max(self._free_at[way], now) + seconds
        return self._free_at[way] - now
