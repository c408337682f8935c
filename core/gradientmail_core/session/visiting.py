"""A look at a run from outside: its mailbox opened by URL, requests counted, and a store that is silent given up on.

A node of a run waits for its store as long as it takes. Somebody who asks a question wants an answer, if only that
there is none.
"""

import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from gradientmail_core.clock import SystemClock
from gradientmail_core.engine.run import Host
from gradientmail_core.engine.survey import listing
from gradientmail_core.errors import MailboxUnavailable
from gradientmail_core.events import StoreStalled
from gradientmail_core.mailbox import DirectoryMailbox, Mailbox, MeteredMailbox, Usage, open_mailbox
from gradientmail_core.mailbox.retrying import RetryingMailbox, RetryPolicy
from gradientmail_core.mailbox.surroundings import Described, Surroundings
from gradientmail_core.protocol.keys import MANIFEST
from gradientmail_core.protocol.leases import Timeouts

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
DEADLINE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Visit:
    """What a visitor works with: ``host`` for reading, the ``store`` itself for what it says beyond its objects."""

    host: Host
    store: Mailbox
    meter: MeteredMailbox
    surroundings: Surroundings

    def now(self) -> float:
        """The store's clock as far as it tells, in seconds since 1970; else this machine's."""
        return time.time() + (self.surroundings.clock_offset or 0.0)

    @property
    def usage(self) -> Usage:
        """Requests so far, besides the few for clock and settings."""
        return self.meter.usage


async def visited(url: str, lease_timeout: float, writes: bool, work: Callable[[Visit], Awaitable[T]]) -> T:
    """What ``work`` returns about the mailbox at ``url``.

    A visitor that ``writes`` nothing asks no directory for its clock, which takes a file. Raises
    :class:`MailboxUnavailable` for a store that is silent for half a minute, and what ``open_mailbox`` raises.
    """
    store, clock = open_mailbox(url, must_exist=True), SystemClock()
    meter, entropy = MeteredMailbox(store), random.Random(secrets.randbits(64))
    policy = RetryPolicy(deadline=DEADLINE_SECONDS, report_after=PATIENCE_SECONDS)
    patient = RetryingMailbox(meter, clock, entropy, _Impatience(store.url), policy)
    try:
        timeouts = Timeouts(lease_timeout)
        host = Host("visitor", secrets.token_hex(8), patient, clock, entropy, timeouts, lambda event: None)
        asks = isinstance(store, Described) and (writes or not isinstance(store, DirectoryMailbox))
        await listing(host.mailbox, MANIFEST)  # a store that is silent to this need not be asked about itself
        said = await store.surroundings() if asks and isinstance(store, Described) else Surroundings()
        return await work(Visit(host, store, meter, said))
    finally:
        await patient.close()
        clock.close()


@dataclass(frozen=True, slots=True)
class _Impatience:
    """Ends the wait for a store once it has been silent for long."""

    url: str

    def __call__(self, stalled: StoreStalled) -> None:
        raise MailboxUnavailable(
            f"{self.url} has not answered for {stalled.seconds:.0f} s: {stalled.cause}",
            "Check the URL, the network, and that the store is up.",
        )
