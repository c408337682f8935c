"""``gradientmail demo``: run the experiments, and end with a table, a picture and, if asked for, JSON."""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch import Tensor

from gradientmail_core.errors import ConfigurationError
from gradientmail_lightning.demo.corpus import Corpus, read_corpus
from gradientmail_lightning.demo.experiment import Laboratory, below, check_unused
from gradientmail_lightning.demo.node import held_out_windows
from gradientmail_lightning.demo.picture import draw
from gradientmail_lightning.demo.report import Setup, as_json, as_table
from gradientmail_lightning.demo.results import Results
from gradientmail_lightning.demo.settings import Settings, add_settings, settings_from
from gradientmail_lightning.demo.terminal import Terminal

MOST_NODES = 25
CHURN = "churn"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code. Raises :class:`GradientMailError` for what cannot work or did not."""
    options = _parser().parse_args(argv)
    settings = settings_from(options)
    seeds = _checked(options)
    settings.algorithm(options.nodes)
    signal.signal(signal.SIGTERM, _ended_from_outside)
    terminal = Terminal(sys.stdout)
    corpus = read_corpus()
    with _mailbox(options.mailbox) as mailbox:
        setup = Setup(settings, options.nodes, _parameters(settings), mailbox)
        terminal.text(_introduction(setup, corpus))
        laboratory = Laboratory(settings, options.nodes, options.out / "logs", terminal)
        results = _run(laboratory, seeds, mailbox, terminal, held_out_windows(corpus, settings))
    terminal.text("\n" + as_table(setup, results) + "\n")
    _write(setup, results, options, terminal)
    return 0


def _ended_from_outside(number: int, frame: FrameType | None) -> NoReturn:
    """End as on Ctrl-C, so that no process and no temporary mailbox stays behind."""
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradientmail demo",
        description="Train a small language model on Python's standard library: one node alone, nodes merged through "
        "a mailbox, and a run that a node joins late and another is killed in. All of them real processes.",
    )
    parser.add_argument("--nodes", type=int, default=2, help="nodes that are merged (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--mailbox", help="URL of an empty prefix (default: a temporary directory)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="for picture and logs (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    add_settings(parser)
    return parser


def _checked(options: argparse.Namespace) -> tuple[int, ...]:
    """The seeds; :class:`ConfigurationError` for what cannot be run, before anything is started."""
    try:
        seeds = tuple(dict.fromkeys(int(seed) for seed in options.seeds.split(",")))
    except ValueError:
        raise ConfigurationError(f"--seeds {options.seeds!r} are not whole numbers.", "Write --seeds 0,1,2.") from None
    if options.mailbox is not None:
        asyncio.run(check_unused(options.mailbox))
    if options.steps < options.evaluate_every or options.evaluate_every < 1:
        raise ConfigurationError(
            f"--steps {options.steps} with --evaluate-every {options.evaluate_every} gives no point of a curve.",
            "Use at least as many steps as between two evaluations.",
        )
    if not 2 <= options.nodes <= MOST_NODES:
        raise ConfigurationError(f"--nodes is {options.nodes}.", f"Merging takes from 2 to {MOST_NODES} nodes.")
    try:
        for folder in (options.out, *([options.json.parent] if options.json else [])):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename} cannot be made: {error.strerror}.", "Use another folder."
        ) from error
    return seeds


def _parameters(settings: Settings) -> int:
    return sum(weight.numel() for weight in settings.model().parameters())


@contextmanager
def _mailbox(url: str | None) -> Iterator[str]:
    """The mailbox that was named, or a temporary directory, which is removed afterwards."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="gradientmail-demo-", ignore_cleanup_errors=True) as folder:
        yield Path(folder).as_uri()


def _introduction(setup: Setup, corpus: Corpus) -> str:
    train, held_out = len(corpus.train) / 1e6, len(corpus.held_out) / 1e6
    return (
        f"A byte-level GPT of {setup.parameters:,} parameters reads the source of Python's standard library:\n"
        f"{train:.1f} MB of {corpus.files[0]} files to train on, {held_out:.1f} MB of {corpus.files[1]} held out.\n"
        f"Nodes are processes of {setup.settings.steps} steps each that share nothing but {setup.mailbox}"
    )


def _run(
    laboratory: Laboratory, seeds: Sequence[int], mailbox: str, terminal: Terminal, held_out: Sequence[Tensor]
) -> Results:
    boxes = {name: below(mailbox, name) for name in (*(f"seed-{seed}" for seed in seeds), CHURN)}
    for box in boxes.values():
        asyncio.run(check_unused(box))
    terminal.text("\nOne node alone")
    alone = laboratory.alone(seeds)
    merged = []
    for seed in seeds:
        terminal.text(f"\n{laboratory.nodes} nodes merged, seed {seed}")
        merged.append(laboratory.merged(seed, boxes[f"seed-{seed}"], held_out))
        terminal.line(f"committed model: held-out loss {merged[-1].loss:.3f}")
    terminal.text(f"\n{laboratory.nodes} nodes merged, one more joins late, one is killed, seed {seeds[0]}")
    churn = laboratory.churn(seeds[0], boxes[CHURN], held_out)
    terminal.line(f"committed model: held-out loss {churn.loss:.3f}")
    return Results(alone, tuple(merged), churn, terminal.seconds)


def _write(setup: Setup, results: Results, options: argparse.Namespace, terminal: Terminal) -> None:
    picture = options.out / "demo.png"
    draw(results, setup.nodes, picture)
    terminal.text(f"The picture is {picture.resolve()}")
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(setup, results), indent=1) + "\n", encoding="utf-8")
        terminal.text(f"The figures are {options.json.resolve()}")
    terminal.text(f"All of it took {terminal.seconds:.0f} s")
