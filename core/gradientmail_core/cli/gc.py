"""``gradientmail gc URL``: remove what crashed processes left in a run's mailbox, and nothing that anybody needs.

``--dry-run`` says what would go. What is younger than ``--older-than`` stays, since it may be in flight; so do the
newest versions, the run's records, and every object that is not the run's. It may be broken off at any moment and
begun again, and be run beside a run that trains.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradientmail_core.cli.console import Console, write_json
from gradientmail_core.cli.quantities import bytes_text, seconds
from gradientmail_core.engine.leftovers import HANDOFF_AGE, Leftovers, judged, looked_at, removed
from gradientmail_core.errors import MailboxError, RunMismatch
from gradientmail_core.mailbox.surroundings import Abandoned, Littered
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.session.visiting import Visit, visited

OLDER_THAN = 3600.0
UPLOADS_OLDER_THAN = 86_400.0
LEASE_SECONDS = Timeouts().lease
UPLOADS = "unfinished uploads"
STRANGERS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What ``gc`` found or did: objects and bytes by kind, what it left, and what it could not see."""

    url: str
    dry_run: bool
    alive: tuple[str, ...]
    removed: Mapping[str, Mapping[str, int]]
    young: int
    strangers: tuple[str, ...]
    notes: tuple[str, ...]
    requests: int

    @property
    def objects(self) -> int:
        """Of all kinds."""
        return sum(figures["objects"] for figures in self.removed.values())

    @property
    def size(self) -> int:
        """Bytes of all kinds."""
        return sum(figures["bytes"] for figures in self.removed.values())

    def as_json(self) -> dict[str, object]:
        """Everything, of plain types."""
        return {name: getattr(self, name) for name in self.__slots__}


def main(argv: Sequence[str] | None = None) -> int:
    """Clean the mailbox that ``argv`` names; 0. Raises :class:`GradientMailError` where that cannot be."""
    options = _parser().parse_args(argv)
    console = Console(sys.stdout)

    async def work(visit: Visit) -> Cleaning:
        ages = options.older_than, options.handoffs_older_than
        return await cleaned(visit, console, ages, options.lease_timeout, options.dry_run)

    cleaning = asyncio.run(visited(options.url, options.lease_timeout, True, work))
    for line in as_lines(cleaning):
        console.line(line)
    if options.json is not None:
        write_json(options.json, cleaning.as_json())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradientmail gc",
        description="Remove what crashed processes left in a mailbox: payloads that no record names, snapshots and "
        "shares of closed rounds, old leases and claims, hand-offs nobody came back for, unfinished uploads. May run "
        "beside a run that trains.",
    )
    parser.add_argument("url", metavar="URL", help="the run's mailbox")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON too")
    parser.add_argument(
        "--older-than",
        type=seconds,
        default=OLDER_THAN,
        metavar="TIME",
        help="keep what is younger, such as 30min or 1d; unfinished uploads are kept a day while a node lives "
        "(default: 1h)",
    )
    parser.add_argument(
        "--handoffs-older-than",
        type=seconds,
        default=HANDOFF_AGE,
        metavar="TIME",
        help="keep what a node that is gone handed off to its next start, if it is younger (default: 30d)",
    )
    parser.add_argument(
        "--lease-timeout",
        type=seconds,
        default=LEASE_SECONDS,
        metavar="TIME",
        help="as on the run's nodes (default: %(default)s)",
    )
    return parser


async def cleaned(
    visit: Visit, console: Console, ages: tuple[float, float], lease_timeout: float, dry_run: bool
) -> Cleaning:
    """Look, judge, and unless ``dry_run`` remove what is older than ``ages``, the second for a node's last hand-off.

    Raises :class:`RunMismatch` where there is nothing of a run.
    """
    older_than, handoffs_older_than = ages
    console.progress("reading")
    place = await looked_at(visit.host, visit.now())
    if place.survey is None and not place.objects:
        raise RunMismatch(f"There is no run at {visit.host.mailbox.url}.", "Check the URL.")
    leftovers = judged(place, older_than, lease_timeout, handoffs_older_than)
    alive = tuple(node for node, presence in place.nodes.items() if presence.lives(lease_timeout))
    went = leftovers.figures() if dry_run else await _removed(visit, console, leftovers, lease_timeout)
    uploads, notes = await _uploads(visit, max(older_than, UPLOADS_OLDER_THAN if alive else 0.0), dry_run)
    if uploads.count:
        went = {**went, UPLOADS: {"objects": uploads.count, "bytes": uploads.size}}
    if visit.surroundings.versioned and went:
        notes.append("The bucket keeps old versions: what is removed is billed until a rule deletes those too.")
    if visit.surroundings.locked and went:
        notes.append("The bucket has object lock: what is removed may stay, and be billed, until its retention ends.")
    strangers = tuple(entry.key for entry in leftovers.strangers)
    url = visit.host.mailbox.url
    return Cleaning(url, dry_run, alive, went, len(leftovers.young), strangers, tuple(notes), visit.usage.requests)


async def _removed(
    visit: Visit, console: Console, leftovers: Leftovers, lease_timeout: float
) -> Mapping[str, Mapping[str, int]]:
    total = sum(len(here) for here in leftovers.found.values())
    return await removed(
        visit.host, leftovers, lease_timeout, visit.now, lambda gone: console.progress(f"removed {gone} of {total}")
    )


async def _uploads(visit: Visit, older_than: float, dry_run: bool) -> tuple[Abandoned, list[str]]:
    """Unfinished writes, ended unless ``dry_run``; a note where the store does not show them."""
    if not isinstance(visit.store, Littered):
        return Abandoned(), []
    try:
        return await visit.store.abandoned(older_than, remove=not dry_run), []
    except MailboxError as error:
        return Abandoned(), [f"Unfinished uploads were not looked for. {error}"]


def as_lines(cleaning: Cleaning) -> list[str]:
    """The result for people."""
    lines = [cleaning.url]
    for kind, figures in cleaning.removed.items():
        lines.append(f"  {kind:<20}{figures['objects']:>9,}{bytes_text(figures['bytes']):>12}")
    verb = "would be removed" if cleaning.dry_run else "removed"
    lines.append(
        f"{cleaning.objects:,} objects of {bytes_text(cleaning.size)} {verb}." if cleaning.removed else "Clean."
    )
    if cleaning.young:
        lines.append(f"{cleaning.young:,} more are left for now: they may be in flight, or have no known age.")
    if cleaning.alive:
        lines.append(f"Alive: {', '.join(cleaning.alive)}. What they may need stays.")
    if cleaning.strangers:
        shown = ", ".join(key[:80] for key in cleaning.strangers[:STRANGERS_SHOWN])
        lines.append(f"{len(cleaning.strangers):,} objects are not of this run and stay, such as {shown}.")
    lines += cleaning.notes
    lines.append(f"{cleaning.requests:,} requests.")
    return lines
