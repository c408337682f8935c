"""``gradientmail doctor URL``: is this store fit for a run, why not, and what to do about it.

The exit code is the verdict: 0 for a store that any run works on, 3 for one that only some do, 1 for one that none
does. Everything is tried below a prefix of its own and removed again.
"""

import argparse
import asyncio
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gradientmail_core.cli.console import Console, write_json
from gradientmail_core.clock import SystemClock
from gradientmail_core.mailbox import open_mailbox
from gradientmail_core.mailbox.checks import CHECKS
from gradientmail_core.mailbox.examination import Examination, Finding, Grade, Verdict, advice, examined

HANDLES = 4
LIMITED = 3
EXIT_CODES: Final[dict[Verdict, int]] = {"fit": 0, "limited": LIMITED, "unfit": 1}
MARKS: Final[dict[Grade, str]] = {"good": "ok", "caution": "!!", "bad": "NO", "unknown": "??"}
WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Examine the store that ``argv`` names; the exit code. Raises :class:`GradientMailError` for a bad URL."""
    options = _parser().parse_args(argv)
    console = Console(sys.stdout)
    examination = asyncio.run(_examined(options.url, options.mebibytes << 20, options.races, console))
    console.line(f"\n{examination.url} is {examination.verdict}. {advice(examination)}")
    if options.json is not None:
        write_json(options.json, examination.as_json())
    return EXIT_CODES[examination.verdict]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradientmail doctor",
        description="Try everything that a run asks of a store: creating once, in races; reading and listing what was "
        "just written; speed; clocks; and the store's own rules. Exit code 0: fit, 3: limited, 1: unfit.",
    )
    parser.add_argument("url", metavar="URL", help="the mailbox, as the run would be given it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every finding as JSON too")
    parser.add_argument("--races", type=_count, default=5, help="races for one key (default: %(default)s)")
    parser.add_argument(
        "--mebibytes", type=_count, default=8, help="size of each of four large bodies (default: %(default)s)"
    )
    return parser


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1024:
        raise argparse.ArgumentTypeError("from 1 to 1024")
    return number


async def _examined(url: str, size: int, races: int, console: Console) -> Examination:
    clock = SystemClock()
    handles = [open_mailbox(url, must_exist=True) for _ in range(HANDLES)]
    console.line(f"Examining {handles[0].url}")
    try:
        return await examined(
            handles,
            clock,
            CHECKS,
            size=size,
            races=races,
            tell=console.progress,
            done=lambda finding: console.line(as_text(finding)),
        )
    finally:
        await asyncio.gather(*(handle.close() for handle in handles), return_exceptions=True)
        clock.close()


def as_text(finding: Finding) -> str:
    """A finding for people: mark, check, what was seen, and below it what to do."""
    head = f"  {MARKS[finding.grade]}  {finding.check:<17}"
    lines = textwrap.wrap(finding.observation, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    remedy = textwrap.wrap(finding.remedy, WIDTH, initial_indent=" " * len(head), subsequent_indent=" " * len(head))
    return "\n".join([*lines, *remedy])
