"""``gradientmail simulate``: search for violations, replay one seed, or run a fleet on virtual time.

``--seeds N`` plays N random runs with every fault and judges them; ``--seed N`` tells the story of one; ``--nodes N``
runs that many nodes of the production engine for ``--hours`` and reports what a run of this size would do.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.cli.console import Console
from gradientmail_core.cli.quantities import bandwidth, bytes_text, count, count_text, positive, seconds
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.fleet import Outcome, failures, run
from gradientmail_core.sim.planning import PRESETS, costs, fleet_of, preset
from gradientmail_core.sim.search import Progress, search, told
from gradientmail_core.sim.shrinking import PLAYS_MOST
from gradientmail_core.sim.swarm import Verdict

VIOLATED = 1
REPORT_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate what ``argv`` asks for; 1 if an invariant was violated. Raises :class:`ConfigurationError`."""
    options = _parser().parse_args(argv)
    console = Console(sys.stdout)
    if options.nodes is not None:
        return _fleet(options, console)
    if options.seed is not None:
        return _story(options, console)
    return _search(options, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradientmail simulate",
        description="Run the engine on virtual time: random runs with every fault (--seeds), one of them told in full "
        "(--seed), or a fleet of a given size (--nodes).",
    )
    found = parser.add_argument_group("searching")
    found.add_argument("--seeds", type=positive, default=100, help="random runs to play (default: %(default)s)")
    found.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    found.add_argument("--seed", type=int, help="play this one, print what happened, shrink it if it fails")
    found.add_argument("--no-shrink", action="store_true", help="leave a failing seed as it is")
    found.add_argument("--processes", type=positive, default=os.cpu_count() or 1)
    fleet = parser.add_argument_group("a fleet")
    fleet.add_argument("--nodes", type=positive, help="nodes to run")
    fleet.add_argument("--hours", type=float, default=0.25, help="virtual hours (default: %(default)s)")
    fleet.add_argument("--mtbf", type=seconds, help="mean time between failures of a node, such as 1h")
    fleet.add_argument("--down", type=seconds, default=60.0, help="how long a failed node is down (default: 60s)")
    fleet.add_argument("--bandwidth", type=bandwidth, default=12.5e6, help="of a node (default: 100Mbit)")
    fleet.add_argument("--latency", type=seconds, default=0.03, help="of a request (default: 30ms)")
    fleet.add_argument(
        "--lease-timeout",
        type=seconds,
        default=Timeouts().lease,
        help="a node this long silent is gone; it beats and lists six times in it (default: 120s)",
    )
    fleet.add_argument("--step-seconds", type=seconds, default=1.0, help="one optimizer step (default: 1s)")
    fleet.add_argument("--parameters", type=count, default=124_000_000, help="of the model (default: 124M)")
    fleet.add_argument("--preset", choices=sorted(PRESETS), default="decoupled")
    fleet.add_argument("--sync-every", type=positive, help="in place of the preset's")
    fleet.add_argument("--fragments", type=positive, help="in place of the preset's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return parser


def _search(options: argparse.Namespace, console: Console) -> int:
    def found(verdict: Verdict) -> None:
        console.line(f"seed {verdict.seed}: {'; '.join(verdict.violations)}")

    def progress(state: Progress) -> None:
        text = f"{state.done} of {state.count} seeds, {state.violated} violated, {state.seeds_per_second:.1f} seeds/s"
        print(text, file=sys.stderr, flush=True)

    figures = search(options.first, options.seeds, options.processes, found=found, progress=progress)
    _write(options.json, figures)
    violations = figures["violations"]
    assert isinstance(violations, list)
    console.line(
        f"{figures['seeds']} seeds, {figures['rounds']} rounds, {len(violations)} violated, "
        f"{figures['seeds_per_second']:.2f} seeds per second"
    )
    if violations and not options.no_shrink:
        told(violations[0]["seed"], console.line, PLAYS_MOST)
    return VIOLATED if violations else 0


def _story(options: argparse.Namespace, console: Console) -> int:
    result = told(options.seed, console.line, 0 if options.no_shrink else PLAYS_MOST)
    console.line(f"\n{result.rounds} rounds in {result.seconds:.0f} s of virtual time")
    console.line(f"violated: {'; '.join(result.violations)}" if result.violations else "no invariant was violated")
    return VIOLATED if result.violations else 0


def _fleet(options: argparse.Namespace, console: Console) -> int:
    if not 0 < options.hours <= 1000:
        raise ConfigurationError(f"--hours {options.hours:g} is no span to simulate.", "Give 0.1 to 24, say.")
    duration = options.hours * 3600
    settings = preset(options.preset, sync_every=options.sync_every, fragments=options.fragments)
    up = options.mtbf
    faults = failures(options.nodes, duration, up, options.down, seed=0) if up is not None else ()
    fleet = fleet_of(
        settings,
        nodes=options.nodes,
        parameters=options.parameters,
        bandwidth=options.bandwidth,
        latency=options.latency,
        step_seconds=options.step_seconds,
        seconds=duration,
        lease=options.lease_timeout,
        faults=faults,
    )
    started = reported = time.monotonic()

    def progress(share: float) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported > REPORT_SECONDS:
            reported = now
            left = (now - started) * (1 / share - 1)
            print(f"{share:.0%} of {options.hours:g} h simulated, about {left:.0f} s left", file=sys.stderr, flush=True)

    outcome = run(fleet, progress)
    console.line(as_text(outcome, settings))
    _write(options.json, as_figures(outcome))
    return 0


def as_figures(outcome: Outcome) -> dict[str, object]:
    """What came of a fleet, for a file."""
    traffic, per_day = outcome.traffic, 86_400 / outcome.seconds
    return {
        "nodes": outcome.fleet.nodes,
        "seconds": outcome.seconds,
        "goodput": outcome.goodput,
        "utilization": outcome.utilization,
        "stalled_seconds": outcome.stalled_seconds,
        "tokens_trained": outcome.tokens_trained,
        "tokens_merged": outcome.tokens_merged,
        "rounds": outcome.rounds,
        "participants": outcome.participants,
        "requests_per_day": traffic.requests * per_day,
        "bytes_up_per_day": traffic.bytes_up * per_day,
        "bytes_down_per_day": traffic.bytes_down * per_day,
        "dollars_per_day": costs(traffic).dollars * per_day,
        "egress_dollars_per_day": costs(traffic).egress_dollars * per_day,
        "faults": len(outcome.fleet.faults),
    }


def as_text(outcome: Outcome, settings: DiLoCo) -> str:
    """What came of a fleet, for people."""
    figures, nodes = as_figures(outcome), outcome.fleet.nodes
    price = costs(outcome.traffic)
    day = 86_400 / outcome.seconds
    return "\n".join(
        (
            f"{nodes} nodes for {outcome.fleet.seconds / 3600:g} h, merged every {settings.sync_every} steps in "
            f"{settings.fragments} fragments, {figures['faults']} failures",
            f"  time training        {outcome.goodput:7.1%}   of all node time",
            f"  compute utilization  {outcome.utilization:7.1%}   of living nodes' time",
            f"  tokens merged        {outcome.merged_share:7.1%}   {count_text(outcome.tokens_merged)} of "
            f"{count_text(outcome.tokens_trained)}",
            f"  rounds               {outcome.rounds:7d}   with {outcome.participants:.1f} nodes on average",
            f"  requests             {count_text(outcome.traffic.requests * day / nodes):>7}   a node and day",
            f"  up / down            {bytes_text(outcome.traffic.bytes_up * day / nodes):>7} / "
            f"{bytes_text(outcome.traffic.bytes_down * day / nodes)} a node and day",
            f"  requests cost        ${price.dollars * day:.2f} a day for all; egress, where it is charged, "
            f"${price.egress_dollars * day:.2f}",
        )
    )


def _write(path: Path | None, figures: dict[str, object]) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.", "Choose another --json.") from None


if __name__ == "__main__":
    sys.exit(main())
