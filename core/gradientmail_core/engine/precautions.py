"""What a run does otherwise on a store that cannot decide every race.

The node that creates a run probes the store, and the manifest keeps what it found, so that all nodes take the same
precautions. *atomic*: none. *racy*: two creates at once may both succeed, so one node closes all fragments, another
takes over only when that node's lease is over, and a create counts when its bytes are still there some seconds later.
*none*: one named node creates and closes everything, and nobody takes over.

A node whose own way to the store is worse than the manifest says (a gateway that drops the condition) is refused at
the door: it tries to create the lease that it has just written.
"""

from dataclasses import dataclass

from gradientmail_core.engine.run import Host
from gradientmail_core.errors import MailboxUnavailable, MailboxUnsupported
from gradientmail_core.mailbox import (
    ListedMailbox,
    Mailbox,
    OneWriterMailbox,
    Probe,
    ReadBackMailbox,
    StoreClass,
    probe_store,
)
from gradientmail_core.mailbox.base import CreateOutcome
from gradientmail_core.mailbox.probe import PROBES, remembers_absence
from gradientmail_core.protocol.records import Manifest

PROBES_MOST = 5
REMEDY = (
    "Use a store or a gateway that honours If-None-Match (gradientmail doctor URL tells), "
    "or name one node as syncer=... on every node."
)


@dataclass(frozen=True, slots=True)
class StoreNature:
    """What the creator of a run found its store to be."""

    store: StoreClass
    listed: bool


async def probed(host: Host) -> StoreNature:
    """Probe the store; :class:`MailboxUnsupported` if nothing there keeps a create from overwriting."""
    found = await _settled_probe(host)
    if found.store == "none":
        raise MailboxUnsupported(f"{host.mailbox.url} cannot keep two nodes apart: {found.reason}", REMEDY)
    return StoreNature(found.store, await remembers_absence(host.mailbox, _key(host, "absence")))


async def _settled_probe(host: Host) -> Probe:
    """A probe that came to a verdict, or the fault that kept the last one from it."""
    for attempt in range(PROBES_MOST - 1):
        try:
            return await probe_store(host.mailbox, key=_key(host, f"race-{attempt}"))
        except MailboxUnavailable:
            await host.clock.sleep(1.0)
    return await probe_store(host.mailbox, key=_key(host, "race"))


def _key(host: Host, purpose: str) -> str:
    """A key of this process alone: an incarnation never comes again."""
    return f"{PROBES}{host.node}-{host.incarnation}-{purpose}"


def guarded(host: Host, nature: StoreNature) -> Mailbox:
    """The host's mailbox with the precautions that its store needs."""
    mailbox: Mailbox = host.mailbox
    if nature.listed:
        mailbox = ListedMailbox(mailbox)
    if nature.store == "racy":
        return ReadBackMailbox(mailbox, host.clock)
    return OneWriterMailbox(mailbox) if nature.store == "none" else mailbox


def nature_of(manifest: Manifest) -> StoreNature:
    """What a manifest says of its run's store."""
    return StoreNature(manifest.store, manifest.listed)


async def refuse_overwriting(host: Host, existing: str) -> None:
    """Raise :class:`MailboxUnsupported` if a create overwrites ``existing``, an object whose content nobody reads.

    It may have been swept while the request was on its way, on a slow line; so an object made for the purpose has the
    last word.
    """
    if await host.mailbox.create(existing, b"{}") is CreateOutcome.CREATED:
        await refuse_unconditional(host)
        await host.mailbox.delete(existing)


async def refuse_unconditional(host: Host) -> None:
    """Raise :class:`MailboxUnsupported` if a create overwrites an object made for the purpose."""
    key = _key(host, "door")
    await host.mailbox.put(key, b"{}")
    try:
        if await host.mailbox.create(key, b"{}") is CreateOutcome.CREATED:
            raise MailboxUnsupported(
                f"On this node's way to {host.mailbox.url} a create overwrites what exists: "
                "nodes could not be kept apart.",
                REMEDY,
            )
    finally:
        await host.mailbox.delete(key)
