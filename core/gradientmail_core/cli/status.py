"""``gradientmail status URL``: how a run is doing, read from its mailbox alone.

Nothing is written, and the nodes do not notice. What is said of nodes is what their last beats said; a beat is at
most twenty seconds old while its node lives. Exit code 0 for a run, whether anybody trains or not.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from gradientmail_core.cli.console import Console, write_json
from gradientmail_core.cli.quantities import bytes_text, count_text, seconds
from gradientmail_core.engine.report import Node, Report, Round, age_text, reported
from gradientmail_core.errors import RunMismatch
from gradientmail_core.protocol.keys import LeaseState
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.session.visiting import Visit, visited

LEASE_SECONDS = Timeouts().lease
DOING: Final[Mapping[LeaseState, str]] = {
    "j": "joining",
    "t": "training",
    "w": "waiting for others",
    "e": "paused",
    "l": "training, closes nothing",
    "v": "waiting, closes nothing",
    "p": "paused, closes nothing",
    "s": "only closing",
    "d": "leaving",
    "x": "left",
}
SETTINGS_SHOWN = ("sync_every", "fragments", "quorum_size", "delta_codec", "commit_codec", "master_dtype")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the state of the run that ``argv`` names; 0. Raises :class:`GradientMailError` where there is none."""
    options = _parser().parse_args(argv)
    report, requests = asyncio.run(
        visited(options.url, options.lease_timeout, False, lambda visit: _read(visit, options.lease_timeout))
    )
    console = Console(sys.stdout)
    for line in as_lines(report):
        console.line(line)
    console.line(f"Read with {requests} requests, and what it took to learn the store's clock.")
    if options.json is not None:
        write_json(options.json, {**report.as_json(), "requests": requests})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradientmail status",
        description="Who trains, how far the run is, what was merged and refused, what is stored. Writes nothing.",
    )
    parser.add_argument("url", metavar="URL", help="the run's mailbox")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON too")
    parser.add_argument(
        "--lease-timeout",
        type=seconds,
        default=LEASE_SECONDS,
        metavar="TIME",
        help="as on the run's nodes: who was silent for longer is not there (default: %(default)s)",
    )
    return parser


async def _read(visit: Visit, lease_timeout: float) -> tuple[Report, int]:
    report = await reported(visit.host, visit.now(), lease_timeout)
    if report is None:
        raise RunMismatch(f"There is no run at {visit.host.mailbox.url}.", "Check the URL, or start a node first.")
    return report, visit.usage.requests


def as_lines(report: Report) -> Iterator[str]:
    """The report for people."""
    yield f"Run {report.run[:8]} at {report.url}"
    settings = [f"{name} {report.settings[name]}" for name in SETTINGS_SHOWN if report.settings.get(name) is not None]
    yield f"  {report.settings.get('name', 'DiLoCo')}: {', '.join(settings)}; {report.parameters:,} parameters"
    yield report.verdict
    yield from _section("Nodes", [_node(node) for node in report.nodes])
    yield from _section(
        f"Newest {report.unit} of each fragment",
        [f"{p}  {each.version}, {age_text(each.age)}" for p, each in enumerate(report.fragments)],
    )
    yield from _section("Recent rounds", [_round(each) for each in report.rounds])
    stored = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in report.stored.items())
    yield from _section("Stored", [stored])
    yield ""


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield title
        yield from (f"  {line}" for line in lines)


def _node(node: Node) -> str:
    doing = DOING[node.state] if node.lives or node.state == "x" else f"silent (was {DOING[node.state]})"
    with_what = f", with {node.framework}" if node.framework else ""
    tokens = f", {count_text(node.tokens)} tokens in its last round" if node.tokens is not None else ""
    return f"{node.name}  {doing}, step {node.step:,}{tokens}{with_what}, {age_text(node.age)}"


def _round(round: Round) -> str:
    merged = ", ".join(f"{node} ({steps} steps)" if steps else node for node, steps in round.participants)
    refused = "".join(f"; refused {node} ({reason})" for node, reason in round.refusals)
    return f"{round.round}  fragment {round.fragment}, step {round.step:,}: {merged or 'nothing merged'}{refused}"
