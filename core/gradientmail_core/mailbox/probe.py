"""What a store's ``create`` is worth, found out by racing it.

Stores that accept the condition and ignore it exist, and so do stores that check and then write: both
look fine to a single writer. So sixteen different bodies are created under one new key at once, and once
more when it exists. The answers are compared with what the key holds in the end.
"""

import asyncio
import itertools
import secrets
from dataclasses import dataclass

from gradientmail_core.errors import MailboxUnavailable, MailboxUnsupported
from gradientmail_core.mailbox.base import CreateOutcome, Mailbox, StoreClass

CONTENDERS = 16
PROBES = "probe/"
ASKED_AGAIN = 3


@dataclass(frozen=True, slots=True)
class Probe:
    """The verdict, and the observation behind it in one sentence."""

    store: StoreClass
    reason: str


def probe_key() -> str:
    """A key that no run and no other probe uses."""
    return f"{PROBES}{secrets.token_hex(8)}"


async def probe_store(mailbox: Mailbox, *others: Mailbox, key: str = "", contenders: int = CONTENDERS) -> Probe:
    """Race ``contenders`` creates for ``key`` (default: a new one), then clean up.

    ``others`` are more handles on the same mailbox, with connections of their own, that take part in the race.
    Raises :class:`MailboxUnavailable` when the store settled too little to tell, :class:`MailboxDenied` when it
    refuses. ``atomic`` after one probe means that no fault was seen; a store that races rarely may pass.
    """
    key = key or probe_key()
    bodies = [b"%d of %s" % (n, key.encode()) for n in range(contenders)]
    try:
        handles = itertools.cycle((mailbox, *others))
        attempts = (handle.create(key, body) for handle, body in zip(handles, bodies, strict=False))
        answers = await asyncio.gather(*attempts, return_exceptions=True)
        if any(isinstance(answer, MailboxUnsupported) for answer in answers):
            return Probe("none", "The store refuses creates that must not overwrite.")
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, MailboxUnavailable):
                raise answer
        winners = [body for body, answer in zip(bodies, answers, strict=True) if answer is CreateOutcome.CREATED]
        return await _judged(mailbox, key, bodies, winners)
    finally:
        await mailbox.delete(key)


async def _judged(mailbox: Mailbox, key: str, bodies: list[bytes], winners: list[bytes]) -> Probe:
    before = await mailbox.get(key)
    if before is None:
        raise MailboxUnavailable("The store shows nothing under a key that was just written.")
    again = await mailbox.create(key, b"late")
    after = await mailbox.get(key)
    if after is None:
        raise MailboxUnavailable("The store does not show an object that it has just shown.")
    if again is CreateOutcome.CREATED or after != before:
        return Probe("none", "A create overwrote an object that existed.")
    if len(winners) > 1:
        return Probe("racy", f"{len(winners)} of {len(bodies)} concurrent creates of one key succeeded.")
    if before not in (winners or bodies):
        return Probe("racy", "The key holds another object than the one whose create succeeded.")
    return Probe("atomic", f"One of {len(bodies)} concurrent creates of one key succeeded.")


async def remembers_absence(mailbox: Mailbox, key: str) -> bool:
    """Whether the store goes on saying that ``key`` is missing, once asked for it, when a listing shows it."""
    try:
        await mailbox.get(key)
        await mailbox.put(key, b"here")
        for _ in range(ASKED_AGAIN):
            if await mailbox.get(key) is not None:
                return False
        return key in [entry.key async for entry in mailbox.list(key)]
    finally:
        await mailbox.delete(key)
