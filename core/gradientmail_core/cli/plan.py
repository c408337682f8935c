"""``gradientmail plan``: the presets side by side for a model, a line and a number of nodes, and one to start from."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gradientmail_core.cli.console import Console
from gradientmail_core.cli.quantities import bandwidth, bytes_text, count, count_text, positive, seconds
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.sim.planning import (
    NODES_MOST,
    PRESETS,
    Question,
    Row,
    answer,
    longer_cycle,
    parameters_of,
    recommended,
)

HEAD = ("preset", "H", "P", "training", "compute", "merged", "stall", "up", "down", "requests", "$/day", "+egress")
UNITS = ("", "steps", "", "of time", "util.", "tokens", "a step", "a day", "a day", "a day", "all nodes", "all nodes")


def main(argv: Sequence[str] | None = None) -> int:
    """Answer ``argv``'s question; 0. Raises :class:`ConfigurationError` for what cannot be planned."""
    options = _parser().parse_args(argv)
    parameters = options.parameters if options.config is None else parameters_of(options.config)
    if parameters is None:
        raise ConfigurationError("No model size was given.", "Give --parameters 1.5B or --config config.json.")
    question = Question(
        parameters=parameters,
        nodes=options.nodes,
        bandwidth=options.bandwidth,
        latency=options.latency,
        step_seconds=options.step_seconds,
        tokens=options.tokens,
        mtbf=options.mtbf,
        down=options.down,
    )
    console = Console(sys.stdout)
    rows = [_answered(question, name, console) for name in options.presets]
    console.line(as_text(question, rows))
    if options.json is not None:
        _write(options.json, json.dumps(as_figures(question, rows), indent=1) + "\n")
    if options.picture is not None:
        console.line(f"wrote {drawn(rows, options.picture)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradientmail plan",
        description="Compare the presets for a model, a line and some nodes, by running the engine on virtual time.",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--parameters", type=count, help="trainable parameters, such as 124M or 7B")
    model.add_argument("--config", type=Path, metavar="FILE", help="a model's config.json, to count them")
    parser.add_argument("--nodes", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--bandwidth", type=bandwidth, default=12.5e6, help="of a node (default: 100Mbit)")
    parser.add_argument("--latency", type=seconds, default=0.03, help="of a request (default: 30ms)")
    parser.add_argument("--step-seconds", type=seconds, default=1.0, help="one optimizer step (default: 1s)")
    parser.add_argument("--tokens", type=count, default=1024, help="of a node's step (default: %(default)s)")
    parser.add_argument("--mtbf", type=seconds, help="mean time between failures of a node, such as 6h")
    parser.add_argument("--down", type=seconds, default=60.0, help="how long a failed node is down (default: 60s)")
    parser.add_argument("--presets", type=_presets, default=PRESETS, help=f"of {','.join(PRESETS)} (default: all)")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the comparison (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return parser


def _presets(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in PRESETS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(PRESETS)}")
    return names


def _answered(question: Question, name: str, console: Console) -> Row:
    console.progress(f"running {name}")
    return answer(question, name)


def as_text(question: Question, rows: Sequence[Row]) -> str:
    """The table and the recommendation."""
    cells = [HEAD, UNITS, *(_cells(question, row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
    table = "\n".join(
        "  ".join(text.ljust(width) if not place else text.rjust(width) for place, (text, width) in enumerate(line))
        for line in (list(zip(row, widths, strict=True)) for row in cells)
    )
    best, why = recommended(rows)
    lines = [
        f"{count_text(question.parameters)} parameters, {question.nodes} nodes at "
        f"{question.bandwidth * 8 / 1e6:g} Mbit/s, {question.step_seconds:g} s a step",
        table,
        f"\nStart from DiLoCo.{best.preset}(): {why}.",
        *_advice(question, best),
    ]
    return "\n".join(lines)


def _advice(question: Question, best: Row) -> list[str]:
    lines = []
    longer = longer_cycle(best, question)
    if longer is not None:
        lines.append(f"The line does not keep up with its cycle: sync_every={longer} would leave it the time.")
    if 1 < best.settings.fragments < question.nodes:
        lines.append(f"fragments={question.nodes} would let every node close one and spread the downloads evenly.")
    if question.nodes > NODES_MOST:
        lines.append(f"Simulated with {NODES_MOST} nodes; what closers download grows with the rest.")
    return lines


def _cells(question: Question, row: Row) -> tuple[str, ...]:
    outcome, settings = row.outcome, row.settings
    steps = max(outcome.trained_seconds / question.step_seconds, 1)
    return (
        row.preset,
        str(settings.sync_every),
        str(settings.fragments),
        f"{outcome.goodput:.1%}",
        f"{outcome.utilization:.1%}",
        f"{min(outcome.merged_share, 1.0):.1%}",
        f"{outcome.stalled_seconds / steps * 1000:.0f} ms",
        bytes_text(outcome.traffic.bytes_up * row.days),
        bytes_text(outcome.traffic.bytes_down * row.days),
        count_text(outcome.traffic.requests * row.days),
        f"{row.dollars_per_node_day * question.nodes:.2f}",
        f"{row.egress_dollars_per_node_day * question.nodes:.2f}",
    )


def as_figures(question: Question, rows: Sequence[Row]) -> dict[str, object]:
    """The comparison, for a file; traffic and dollars are per node and day."""
    best, why = recommended(rows)
    return {
        "parameters": question.parameters,
        "nodes": question.nodes,
        "bandwidth": question.bandwidth,
        "step_seconds": question.step_seconds,
        "recommended": best.preset,
        "why": why,
        "presets": [
            {
                "preset": row.preset,
                "sync_every": row.settings.sync_every,
                "fragments": row.settings.fragments,
                "goodput": row.outcome.goodput,
                "utilization": row.outcome.utilization,
                "merged_share": row.outcome.merged_share,
                "tokens_merged": row.outcome.tokens_merged,
                "stalled_seconds": row.outcome.stalled_seconds,
                "bytes_up": row.outcome.traffic.bytes_up * row.days,
                "bytes_down": row.outcome.traffic.bytes_down * row.days,
                "requests": row.outcome.traffic.requests * row.days,
                "dollars": row.dollars_per_node_day,
                "egress_dollars": row.egress_dollars_per_node_day,
            }
            for row in rows
        ],
    }


def drawn(rows: Sequence[Row], path: Path) -> Path:
    """Draw the comparison into a PNG; :class:`ConfigurationError` without matplotlib or a place for it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigurationError("Drawing needs matplotlib.", "Run: pip install matplotlib") from None
    figure = Figure(figsize=(9, 4), layout="constrained")
    shares, money = figure.subplots(1, 2, width_ratios=(3, 2))
    places = range(len(rows))
    named = [("training", "goodput"), ("computing", "utilization"), ("tokens merged", "merged_share")]
    for number, (label, name) in enumerate(named):
        values = [min(getattr(row.outcome, name), 1.0) for row in rows]
        shares.bar([place + 0.27 * (number - 1) for place in places], values, width=0.25, label=label)
    shares.set_xticks(list(places), [row.preset for row in rows])
    shares.set_ylim(0, 1.15)
    shares.set_ylabel("share")
    shares.legend(ncols=3, frameon=False, fontsize="small")
    money.barh(list(places), [row.egress_dollars_per_node_day for row in rows], label="egress")
    money.barh(list(places), [row.dollars_per_node_day for row in rows], label="requests")
    money.set_yticks(list(places), [row.preset for row in rows])
    money.set_xlabel("dollars per node and day")
    money.legend(frameon=False, fontsize="small")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be drawn: {error}.", "Name a .png file.") from None
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.", "Choose another --json.") from None


if __name__ == "__main__":
    sys.exit(main())
