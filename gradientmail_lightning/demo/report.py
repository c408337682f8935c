"""The demo's results for a person and for a program: a table, and JSON with the same figures and the curves."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from gradientmail_core.algorithms.outer import outer_settings
from gradientmail_lightning.demo.results import Mark, Outcome, Results, mean
from gradientmail_lightning.demo.settings import OUTER, Settings


@dataclass(frozen=True, slots=True)
class Setup:
    """What was run: each node's settings, how many nodes were merged, the model's parameters, the mailbox's URL."""

    settings: Settings
    nodes: int
    parameters: int
    mailbox: str


def as_json(setup: Setup, results: Results) -> dict[str, object]:
    """The results as plain JSON; ``single_loss`` and ``merged_loss`` are means over the seeds, in nats per byte."""
    return {
        "single_loss": mean(results.alone, lambda outcome: outcome.loss),
        "merged_loss": mean(results.merged, lambda outcome: outcome.loss),
        "per_seed": [
            {"seed": alone.seed, "single_loss": alone.loss, "merged_loss": merged.loss}
            for alone, merged in zip(results.alone, results.merged, strict=True)
        ],
        "churn_loss": results.churn.loss,
        "nodes": setup.nodes,
        "parameters": setup.parameters,
        "settings": asdict(setup.settings),
        "outer": outer_settings(OUTER),
        "mailbox": setup.mailbox,
        "seconds": results.seconds,
        "joins": [asdict(mark) for mark in results.churn.marks if mark.what == "join"],
        "kills": [asdict(mark) for mark in results.churn.marks if mark.what == "kill"],
        "runs": {
            "single": [asdict(outcome) for outcome in results.alone],
            "merged": [asdict(outcome) for outcome in results.merged],
            "churn": asdict(results.churn),
        },
    }


def as_table(setup: Setup, results: Results) -> str:
    """The results as text, at most 120 columns wide."""
    sections = (_losses(setup, results), _costs(setup, results), [*_setup(setup), *map(_event, results.churn.marks)])
    return "\n\n".join("\n".join(lines) for lines in sections)


def _losses(setup: Setup, results: Results) -> list[str]:
    pairs = [(str(one.seed), one.loss, all_.loss) for one, all_ in zip(results.alone, results.merged, strict=True)]
    if len(pairs) > 1:
        pairs.append(("mean", mean(results.alone, _loss), mean(results.merged, _loss)))
    rows = [(seed, f"{one:.3f}", f"{all_:.3f}", f"{all_ - one:+.3f}") for seed, one, all_ in pairs]
    title = f"Held-out loss after {setup.settings.steps} steps of each node, in nats per byte"
    return [title, "", *_columns([("seed", "one node alone", f"{setup.nodes} nodes merged", "difference"), *rows])]


def _costs(setup: Setup, results: Results) -> list[str]:
    groups = (results.alone, results.merged, (results.churn,))

    def row(name: str, form: str, figure: Callable[[Outcome], float]) -> tuple[str, ...]:
        figures = (mean(group, figure) for group in groups)
        return (name, *(format(value, form) if value else "-" for value in figures))

    return _columns(
        [
            ("mean of a run", "one node alone", f"{setup.nodes} nodes merged", "join and kill"),
            row("held-out loss", ".3f", _loss),
            row("seconds", ".1f", lambda outcome: outcome.seconds),
            row("commits", ".0f", lambda outcome: outcome.commits),
            row("requests", ",.0f", lambda outcome: outcome.requests),
            row("MB up and down", ".1f", lambda outcome: outcome.bytes / 1e6),
        ]
    )


def _setup(setup: Setup) -> list[str]:
    own = setup.settings
    fragments = "as a whole" if own.fragments == 1 else f"in {own.fragments} fragments"
    return [
        f"  model    {setup.parameters:,} parameters: {own.layers} layers of width {own.width}",
        f"  node     {own.steps} steps of {own.batch} x {own.context} bytes, AdamW at {own.lr:g}",
        f"  merge    every {own.sync_every} steps, {fragments}, waiting for every live node",
        f"  outer    Nesterov, lr {OUTER.lr:g}, momentum min({OUTER.momentum:g}, k/(k + {OUTER.warmup:g})) at round k",
        f"  mailbox  {setup.mailbox}",
    ]


def _event(mark: Mark) -> str:
    return f"  {mark.what:<7}  {mark.node} (pid {mark.pid}) at step {mark.step}, after {mark.seconds:.1f} s"


def _loss(outcome: Outcome) -> float:
    return outcome.loss


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length, the first column to the left and the others to the right, a rule below the heads."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  "
        + "   ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return [lines[0], "  " + "-" * (len(lines[0]) - 2), *lines[1:]]
