"""Entering a run: find its manifest or create it, check that it is the same run, load its heads.

Creation is a race with one winner. A node that finds no manifest claims ``creation/{n}``; the holder uploads
the initial parameters and then creates the manifest, so a manifest never names what is not there. Others wait
for it, and take the next claim if the holder shows no life for the lease time-out. A fresh node can never
replace what was trained: initial parameters count only through a manifest, and there is one manifest for ever.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradientmail_core.algorithms.diloco import DiLoCo, settings_difference
from gradientmail_core.algorithms.settings import Shared
from gradientmail_core.engine.chain import Head, first_seen, genesis, succeeded
from gradientmail_core.engine.healing import ask
from gradientmail_core.engine.learner import Commit
from gradientmail_core.engine.loading import Source, parameters
from gradientmail_core.engine.patience import Patience
from gradientmail_core.engine.precautions import StoreNature, guarded, probed
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.errors import MailboxError, RunMismatch, SchemaMismatch
from gradientmail_core.events import ObjectIgnored, PayloadSkipped, RunCreated, RunWaited
from gradientmail_core.mailbox import ListedMailbox
from gradientmail_core.mailbox.examination import DOCTOR
from gradientmail_core.mailbox.probe import PROBES
from gradientmail_core.protocol.exchange import (
    Decided,
    Won,
    bounded_get,
    create_once,
    newest_round,
    put_section,
    read_round,
)
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import LEASES, MANIFEST, LeaseKey, creation_key, parse_live
from gradientmail_core.protocol.leases import Roster, is_alive, observed
from gradientmail_core.protocol.plan import manifest_layouts, manifest_schema, plan_rows, schema_rows
from gradientmail_core.protocol.records import (
    MANIFEST_LONGEST,
    Claim,
    Manifest,
    digest,
    parse_claim,
    parse_manifest,
)
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Schema, schema_difference

OWN_PREFIXES = (
    "creation/",
    "tape/",
    "live/",
    "blobs/",
    "units/",
    "ranks/",
    "barriers/",
    "syncer/",
    "handoff/",
    PROBES,
    DOCTOR,
)
DIFFERENCES_SHOWN = 12
READ_BACKS_LEAST = 5
CREATION_POLL_SECONDS = 0.2
OLDER_MOST = 3
CREATION_POLL_MOST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Found:
    """A manifest in the mailbox, and the digest of its bytes."""

    manifest: Manifest
    digest: str
    layouts: tuple[FragmentLayout, ...]


async def find_run(host: Host) -> Found | None:
    """The run at this prefix, or None if there is none yet.

    Raises :class:`RunMismatch` if the prefix holds something else.
    """
    body = await _manifest_body(host)
    if body is None:
        await _refuse_foreign(host)
        return None
    manifest = parse_manifest(body)
    layouts = manifest_layouts(manifest) if isinstance(manifest, Manifest) else manifest
    if isinstance(manifest, Rejected) or isinstance(layouts, Rejected):
        refused = manifest if isinstance(manifest, Rejected) else layouts
        assert isinstance(refused, Rejected)
        raise RunMismatch(
            f"{host.mailbox.url}/{MANIFEST} is no manifest this library can read ({refused.reason}).",
            "Use another prefix, or the version of gradientmail that created the run.",
        )
    return Found(manifest, digest(body), layouts)


async def _manifest_body(host: Host) -> bytes | None:
    """The manifest, asked for only once a listing shows it, since some stores remember that it was missing."""
    return await bounded_get(ListedMailbox(host.mailbox), MANIFEST, MANIFEST_LONGEST)


async def _refuse_foreign(host: Host) -> None:
    async for entry in host.mailbox.list(""):
        if not entry.key.startswith(OWN_PREFIXES) and entry.key != MANIFEST:
            raise RunMismatch(
                f"{host.mailbox.url} is in use: it holds {entry.key[:80]!r} and no run.",
                "Give the run an empty prefix of its own.",
            )


def checked(found: Found, settings: DiLoCo, schema: Schema, frozen: str | None, url: str) -> Run:
    """The run, if this node's model and settings are the run's; raises what :func:`check_same` raises."""
    check_same(found, settings, schema, frozen, url)
    return Run(found.manifest, found.digest, found.layouts, settings)


def check_same(found: Found, settings: Shared, schema: Schema, frozen: str | None, url: str) -> None:
    """Nothing, if this node's model and settings are the run's.

    Raises :class:`SchemaMismatch` or :class:`RunMismatch` with the differences.
    """
    run_schema = manifest_schema(found.manifest)
    if run_schema.digest != schema.digest:
        lines = schema_difference(schema, run_schema)
        more = f"\n  and {len(lines) - DIFFERENCES_SHOWN} more" if len(lines) > DIFFERENCES_SHOWN else ""
        raise SchemaMismatch(
            f"This model has other trainable tensors than the run at {url}:\n  "
            + "\n  ".join(lines[:DIFFERENCES_SHOWN])
            + more
            + "\n",
            "Build the same model on every node, or use another prefix.",
        )
    differences = settings_difference(settings.shared_settings(), found.manifest.algorithm)
    if differences:
        raise RunMismatch(
            f"The run at {url} has other settings:\n  " + "\n  ".join(differences) + "\n",
            "Use the run's settings on every node, or another prefix.",
        )
    if found.manifest.frozen != frozen:
        raise RunMismatch(
            f"The frozen parameters of this model differ from those of the run at {url}.",
            "Load the same base model on every node.",
        )


async def create_run(
    host: Host,
    settings: Shared,
    schema: Schema,
    frozen: str | None,
    layouts: Sequence[FragmentLayout],
    theta: Sequence[Flat],
    syncer: str | None = None,
) -> Found:
    """Create the run with ``theta`` as its initial parameters, or wait for the node that does.

    With ``syncer`` that node alone creates it, and will close all its rounds; no create needs to be conditional
    then. Without, raises :class:`MailboxUnsupported` on a store that has none.
    """
    if syncer is not None:
        if syncer != host.node:
            return await _await_syncer(host, syncer)
        nature, run_id = StoreNature("none", listed=False), f"{host.random.getrandbits(128):032x}"
        return await _created(host, nature, run_id, settings, schema, frozen, layouts, theta)
    run_id = f"{host.random.getrandbits(128):032x}"
    claim = Claim(run_id, host.node, host.incarnation, host.nonce())
    number = 0
    while True:
        outcome = await create_once(host.mailbox, host.clock, creation_key(number), claim.encoded())
        if isinstance(outcome, Won):
            nature = await _probed(host, creation_key(number))
            return await _created(host, nature, run_id, settings, schema, frozen, layouts, theta)
        holder = parse_claim(outcome.body, None)
        if isinstance(holder, Claim) and not _own_older(holder, host):
            host.emit(RunWaited(f"waiting for {holder.node} to create the run"))
            found = await _await_manifest(host, holder.node, holder.incarnation)
            if found is not None:
                return found
        number += 1


def _own_older(holder: Claim, host: Host) -> bool:
    return holder.node == host.node and holder.incarnation != host.incarnation


async def _probed(host: Host, claim: str) -> StoreNature:
    """What the store is; a refused one is left without the claim."""
    try:
        return await probed(host)
    except MailboxError:
        await host.mailbox.delete(claim)
        raise


async def _await_syncer(host: Host, syncer: str) -> Found:
    """The run that ``syncer`` creates, however long that takes."""
    while True:
        host.emit(RunWaited(f"waiting for {syncer}, the syncer, to create the run"))
        found = await _await_manifest(host, syncer)
        if found is not None:
            return found


async def _created(
    host: Host,
    nature: StoreNature,
    run_id: str,
    settings: Shared,
    schema: Schema,
    frozen: str | None,
    layouts: Sequence[FragmentLayout],
    theta: Sequence[Flat],
) -> Found:
    existing = await find_run(host)
    if existing is not None:
        return existing
    sections = await asyncio.gather(
        *(
            put_section(
                host.mailbox,
                host.clock,
                "theta",
                layout.fragment,
                host.node,
                layout,
                values,
                codec=settings.master_dtype,
                link=host.link,
                compression=settings.compression if isinstance(settings, DiLoCo) else None,
            )
            for layout, values in zip(layouts, theta, strict=True)
        )
    )
    manifest = Manifest(
        run=run_id,
        node=host.node,
        nonce=host.nonce(),
        schema=schema_rows(schema),
        plan=plan_rows(layouts),
        algorithm=settings.shared_settings(),
        store=nature.store,
        closers=tuple(host.node for _ in layouts),
        frozen=frozen,
        theta=tuple(sections),
        listed=nature.listed,
    )
    host = replace(host, mailbox=guarded(host, nature))
    body = manifest.encoded()
    outcome = await create_once(host.mailbox, host.clock, MANIFEST, body, MANIFEST_LONGEST)
    found = await _read_back(host)
    if found is None or (isinstance(outcome, Won) and found.digest != digest(body)):
        raise RunMismatch(
            f"{host.mailbox.url} does not give back the manifest it took.",
            "Use a store with read-after-write consistency.",
        )
    if isinstance(outcome, Won):
        host.emit(RunCreated(run_id, host.mailbox.url, len(layouts), schema.elements))
    else:
        kept = {section.key for section in found.manifest.theta}
        for section in sections:
            if section.key not in kept:
                await host.mailbox.delete(section.key)
    return found


async def _read_back(host: Host) -> Found | None:
    """The manifest that must be there by now; None only if it was not found for the lease time-out, nor the last times.

    One question may take longer than the time-out on a bad line, and its answer may miss the object for once.
    """
    give_up_at, asked = host.clock.now() + host.timeouts.lease, 1
    found = await find_run(host)
    while found is None and (asked < READ_BACKS_LEAST or host.clock.now() < give_up_at):
        await host.clock.sleep(CREATION_POLL_SECONDS)
        found, asked = await find_run(host), asked + 1
    return found


async def _await_manifest(host: Host, holder: str, incarnation: str | None = None) -> Found | None:
    """The manifest once it appears; None when its creator shows no life for the lease time-out.

    A creator that was started anew holds the old claim no longer: it may wait for a claim of this very node.
    """
    roster = Roster()
    started = list_at = host.clock.now()
    wait = CREATION_POLL_SECONDS
    while True:
        if await _manifest_body(host) is not None:
            return await find_run(host)
        now = host.clock.now()
        if now >= list_at:
            roster = observed(roster, await listed_leases(host), now, host.timeouts)
            list_at = now + host.timeouts.period
        presence = roster.get(holder)
        alive = is_alive(presence, now, host.timeouts) if presence else now - started < host.timeouts.lease
        if presence is not None and incarnation not in (None, presence.lease.tag):
            alive = False
        if not alive:
            return None
        await host.clock.sleep(host.jitter(wait))
        wait = min(wait * 1.5, CREATION_POLL_MOST_SECONDS)


async def listed_leases(host: Host) -> list[LeaseKey]:
    """Every beat in the mailbox."""
    keys = [parse_live(entry.key) async for entry in host.mailbox.list(LEASES)]
    return [key for key in keys if isinstance(key, LeaseKey)]


async def load_heads(host: Host, run: Run, hints: dict[int, int]) -> list[Commit]:
    """The newest readable commit of every fragment with its parameters, all fragments side by side.

    ``hints`` are rounds that a listing announced, so the search starts near the end of the tape.
    """
    return list(await asyncio.gather(*(_load_head(host, run, layout, hints) for layout in run.layouts)))


async def _load_head(host: Host, run: Run, layout: FragmentLayout, hints: dict[int, int]) -> Commit:
    head = genesis(run.manifest, run.digest, layout.fragment, run.settings.sync_every, host.clock.now())
    hint = hints.get(layout.fragment)
    if hint is not None and hint % run.fragments == layout.fragment:
        state = await read_round(host.mailbox, run.id, hint)
        if isinstance(state, Decided):
            head = succeeded(head, state, run.fragments, host.clock.now())
    head = await _newest(host, run, head)
    patience: Patience | None = None
    source = Source(host.mailbox, host.clock, run.manifest, layout)
    while True:
        began = host.clock.now()
        theta = await parameters(source, head.version, head.sections)
        if not isinstance(theta, Rejected):
            return Commit(_joined(head, host), theta, merged=False)
        if (newest := await _newest(host, run, head)) is not head:  # it may be gone because of the newer one
            head, patience = newest, None
            continue
        if patience is None:
            host.emit(ObjectIgnored(head.sections[0].key, theta.reason))
            await ask(host, head.next_round(run.fragments) - run.fragments)
            patience = Patience.starting(host)
        patience = patience.missed(began)
        if patience.is_over:
            return await _skipped(host, run, source, head, theta)
        await host.clock.sleep(host.jitter(1.0))


async def _newest(host: Host, run: Run, head: Head) -> Head:
    """The newest commit of a fragment from ``head`` on; ``head`` itself if there is no newer."""
    newer = await newest_round(host.mailbox, run.id, head.fragment, run.fragments, head.version)
    return head if newer is None else succeeded(head, newer, run.fragments, host.clock.now())


async def _skipped(host: Host, run: Run, source: Source, head: Head, theta: Rejected) -> Commit:
    """The newest commit, whose own parameters are lost, with those of a version before; RunMismatch without one."""
    if (older := await _older(source, head)) is None:
        raise RunMismatch(
            f"The newest commit of fragment {head.fragment} at {host.mailbox.url} cannot be read: "
            f"{head.sections[0].key} is {theta.reason}.",
            "Restore that object, or start a new run under another prefix.",
        )
    host.emit(PayloadSkipped(head.fragment, head.next_round(run.fragments) - run.fragments, theta.reason))
    return Commit(_joined(head, host), older, merged=False, skipped=head.version)


async def _older(source: Source, head: Head) -> Flat | None:
    """The parameters of the newest readable version before ``head``, of those that are kept; None without one."""
    for version in range(head.version - 1, max(head.version - OLDER_MOST, -1) - 1, -1):
        sections = await source.sections(version)
        theta = await parameters(source, version, sections) if sections else Rejected("no record")
        if not isinstance(theta, Rejected):
            return theta
    return None


def _joined(head: Head, host: Host) -> Head:
    return first_seen(head, host.clock.now())
