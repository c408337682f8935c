"""The checks of an examination: permissions, create-once, visibility, speed, clock and the store's own rules.

Each asks the store for what a run will ask, in the run's way: small records created once from several
connections at a time, read back through another connection, listed; large bodies each way; deletes.
"""

import asyncio
import secrets
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from gradientmail_core.errors import MailboxError
from gradientmail_core.mailbox.base import CreateOutcome
from gradientmail_core.mailbox.examination import Check, Finding, Patient
from gradientmail_core.mailbox.probe import CONTENDERS, Probe, probe_store
from gradientmail_core.mailbox.surroundings import Surroundings

REPEATS = 10
VISIBLE_SECONDS = 10.0
SLOW_SECONDS = 1.0
CLOCK_SKEW_SECONDS = 60.0
BODIES = 4

PERMISSIONS, CREATE_ONCE, DELETES, CLOCK, RULES = "permissions", "create-once", "deletes", "clock", "rules"
READ_AFTER_WRITE, LIST_AFTER_WRITE = "read-after-write", "list-after-write"
LATENCY, THROUGHPUT = "latency", "throughput"

_RANK: Final = {"atomic": 0, "racy": 1, "none": 2}


@dataclass(frozen=True, slots=True)
class Examine:
    """A check by name."""

    name: str
    work: Callable[[Patient], Awaitable[Finding]]
    essential: bool = False

    def __call__(self, patient: Patient) -> Awaitable[Finding]:
        """See :class:`Check`."""
        return self.work(patient)


async def permissions(patient: Patient) -> Finding:
    """Write, read, list and delete, each named if the store refuses it."""
    mailbox, key = patient.handles[0], f"{patient.prefix}/permission"

    async def listing() -> None:
        _ = [entry async for entry in mailbox.list(f"{patient.prefix}/")]

    steps: tuple[tuple[str, Callable[[], Awaitable[object]]], ...] = (
        ("write", lambda: mailbox.put(key, b"x")),
        ("read", lambda: mailbox.get(key)),
        ("list", listing),
        ("delete", lambda: mailbox.delete(key)),
    )
    for verb, step in steps:
        try:
            await step()
        except MailboxError as error:
            return Finding(PERMISSIONS, "bad", f"May not {verb}: {error.cause}", error.remedy)
    return Finding(PERMISSIONS, "good", "May write, read, list and delete.")


async def create_once(patient: Patient) -> Finding:
    """Races between connections of their own; the worst of them counts."""
    worst = Probe("atomic", "")
    for race in range(patient.races):
        patient.tell(f"{CREATE_ONCE}: race {race + 1} of {patient.races}, {CONTENDERS} creators")
        found = await probe_store(*patient.handles, key=f"{patient.prefix}/race/{race}")
        if _RANK[found.store] > _RANK[worst.store]:
            worst = found
        if worst.store == "none":
            break
    if worst.store == "atomic":
        seen = f"One winner in each of {patient.races} races of {CONTENDERS} creators."
        return Finding(CREATE_ONCE, "good", seen, store="atomic")
    remedy = "Use a store or gateway that honours If-None-Match, or a run with one syncer that is named."
    return Finding(CREATE_ONCE, "caution", worst.reason, remedy, store=worst.store)


async def read_after_write(patient: Patient) -> Finding:
    """What was written is read at once through another connection, though its absence was just observed."""
    stale, forgotten = 0, 0
    writer, reader = patient.handles[0], patient.handles[-1]
    for n in range(REPEATS):
        key, body = f"{patient.prefix}/read/{n}", secrets.token_bytes(100)
        await reader.get(key)
        if await writer.create(key, body) is CreateOutcome.CREATED:
            forgotten += await reader.get(key) is None
        await writer.put(key, body[::-1])
        stale += await reader.get(key) != body[::-1]
    if forgotten:
        seen = f"{forgotten} of {REPEATS} new objects were not found at once, as if their absence was remembered."
        return Finding(READ_AFTER_WRITE, "caution", seen, "Switch off caches between node and store, or expect delays.")
    if stale:
        seen = f"{stale} of {REPEATS} reads after an overwrite returned old bytes."
        return Finding(READ_AFTER_WRITE, "caution", seen, "Switch off caches between node and store.")
    return Finding(READ_AFTER_WRITE, "good", f"{REPEATS} of {REPEATS} objects were read back at once.")


async def list_after_write(patient: Patient) -> Finding:
    """How long a new object takes to appear in a listing through another connection."""
    writer, reader = patient.handles[0], patient.handles[-1]
    delays = []
    for n in range(REPEATS):
        key = f"{patient.prefix}/list/{n}"
        await writer.put(key, b"x")
        written = patient.clock.now()
        while key not in [entry.key async for entry in reader.list(f"{patient.prefix}/list/")]:
            if patient.clock.now() - written > VISIBLE_SECONDS:
                seen = f"An object was not listed {VISIBLE_SECONDS:.0f} s after it was written."
                return Finding(LIST_AFTER_WRITE, "bad", seen, "Use a store whose listings are current.")
            await patient.clock.sleep(0.1)
        delays.append(patient.clock.now() - written)
    slowest = max(delays)
    figures = {"slowest_s": slowest}
    if slowest > SLOW_SECONDS:
        seen = f"A new object was listed after up to {slowest:.1f} s."
        return Finding(LIST_AFTER_WRITE, "caution", seen, "Use a lease_timeout of a minute or more.", figures)
    return Finding(LIST_AFTER_WRITE, "good", f"{REPEATS} of {REPEATS} objects were listed at once.", "", figures)


async def latency(patient: Patient) -> Finding:
    """Median and worst time of a small write, read, create and listing, one after the other."""
    mailbox, body = patient.handles[0], b"x" * 1000

    async def listing() -> None:
        _ = [entry async for entry in mailbox.list(f"{patient.prefix}/list/")]

    verbs: dict[str, Callable[[int], Awaitable[object]]] = {
        "put": lambda n: mailbox.put(f"{patient.prefix}/small/{n}", body),
        "get": lambda n: mailbox.get(f"{patient.prefix}/small/{n}"),
        "create": lambda n: mailbox.create(f"{patient.prefix}/once/{n}", body),
        "list": lambda n: listing(),
    }
    figures, said = dict[str, float](), list[str]()
    for verb, request in verbs.items():
        times = [await _seconds(patient, request(n)) for n in range(REPEATS)]
        figures |= {f"{verb}_median_s": statistics.median(times), f"{verb}_worst_s": max(times)}
        said.append(f"{verb} {statistics.median(times) * 1e3:.0f} ms")
    slow = max(value for name, value in figures.items() if name.endswith("median_s")) > SLOW_SECONDS
    seen = f"Medians: {', '.join(said)}."
    if slow:
        return Finding(LATENCY, "caution", seen, "Use a region nearer to the nodes, or merge less often.", figures)
    return Finding(LATENCY, "good", seen, "", figures)


async def throughput(patient: Patient) -> Finding:
    """Some large bodies each way at once, compared byte for byte."""
    mailbox = patient.handles[0]
    bodies = {f"{patient.prefix}/large/{n}": secrets.token_bytes(patient.size) for n in range(BODIES)}
    up = await _seconds(patient, asyncio.gather(*(mailbox.put(key, body) for key, body in bodies.items())))
    start = patient.clock.now()
    found = await asyncio.gather(*(mailbox.get(key, limit=patient.size) for key in bodies))
    down = patient.clock.now() - start
    if list(bodies.values()) != list(found):
        return Finding(THROUGHPUT, "bad", "A large body came back changed.", "Do not use this store.")
    total = BODIES * patient.size
    figures = {"up_bytes_per_s": total / max(up, 1e-9), "down_bytes_per_s": total / max(down, 1e-9)}
    seen = f"{figures['up_bytes_per_s'] / 1e6:.0f} MB/s up, {figures['down_bytes_per_s'] / 1e6:.0f} MB/s down."
    return Finding(THROUGHPUT, "good", seen, "", figures)


async def deletes(patient: Patient) -> Finding:
    """What was deleted is gone, from reads and, soon, from listings, and its key can be created again."""
    writer, reader = patient.handles[0], patient.handles[-1]
    key = f"{patient.prefix}/deleted/1"
    await writer.put(key, b"x")
    await writer.delete(key)
    if await reader.get(key) is not None:
        return Finding(DELETES, "caution", "A deleted object is still read.", "Switch off caches and object lock.")
    if await writer.create(key, b"y") is not CreateOutcome.CREATED:
        return Finding(DELETES, "caution", "The key of a deleted object cannot be created again.")
    return Finding(DELETES, "good", "A deleted object is gone.")


async def clock(patient: Patient) -> Finding:
    """How far the store's clock is from this machine's; requests are signed with this one's."""
    said = await _said(patient)
    if said.clock_offset is None:
        return Finding(CLOCK, "unknown", "The store does not tell its time.")
    offset = said.clock_offset
    figures = {"offset_s": offset}
    seen = f"The store is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} this machine."
    if abs(offset) <= CLOCK_SKEW_SECONDS:
        return Finding(CLOCK, "good", seen, "", figures)
    remedy = "Set this machine's clock: stores refuse requests signed 15 minutes off."
    return Finding(CLOCK, "caution", seen, remedy, figures)


async def rules(patient: Patient) -> Finding:
    """Versioning, lifecycle rules and locks that work against a run."""
    said = await _said(patient)
    if said.expiring:
        seen = f"The bucket removes what a run needs: {'; '.join(said.expiring)}."
        return Finding(RULES, "bad", seen, "Exempt the prefix from the rule: records and payloads stay in use.")
    traps = []
    if said.locked:
        traps.append("Object lock is on: what is swept stays, and is billed, until its retention ends.")
    if said.versioned and not said.old_versions_expire:
        traps.append("Versioning is on: every swept payload stays, and is billed, as an old version.")
    if traps:
        remedy = "Add a lifecycle rule that deletes noncurrent versions after a day, or use another bucket."
        return Finding(RULES, "caution", " ".join(traps), remedy)
    if said.versioned is None and said.expiring is None:
        seen = "The store does not tell its versioning and lifecycle rules."
        return Finding(RULES, "unknown", seen, "See that nothing expires and that old versions are deleted.")
    if said.uploads_expire is False:
        advice = "Consider a rule that aborts unfinished multipart uploads after a day."
        return Finding(RULES, "good", "No versioning, and no rule removes objects.", advice)
    return Finding(RULES, "good", "No rule of the store works against a run.")


async def _said(patient: Patient) -> Surroundings:
    return await patient.described.surroundings() if patient.described is not None else Surroundings()


async def _seconds(patient: Patient, work: Awaitable[object]) -> float:
    start = patient.clock.now()
    await work
    return patient.clock.now() - start


CHECKS: Final[tuple[Check, ...]] = (
    Examine(PERMISSIONS, permissions, essential=True),
    Examine(CREATE_ONCE, create_once),
    Examine(READ_AFTER_WRITE, read_after_write),
    Examine(LIST_AFTER_WRITE, list_after_write),
    Examine(DELETES, deletes),
    Examine(LATENCY, latency),
    Examine(THROUGHPUT, throughput),
    Examine(CLOCK, clock),
    Examine(RULES, rules),
)
