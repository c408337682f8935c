"""``python -m gradientmail_mlx.lora``: mlx-lm's fine-tuning command line, as a node of a run.

Takes every option of ``mlx_lm.lora`` and hands it on; the options named here say which run to join. mlx-lm
looks its ``train`` up in its own module when it gets there, so that one name is set to ours for the length
of the command. SIGTERM ends it like Ctrl-C: the lease is released, nothing half-trained is published.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from mlx_lm import lora as stock

from gradientmail_core.errors import GradientMailError
from gradientmail_core.session.environment import PREFIX, algorithm_from, handoff_from, mailbox_from, role_from
from gradientmail_mlx.training import train

FAILED, INTERRUPTED = 1, 130

_OPTIONS: Final[Mapping[str, str]] = {
    "mailbox": "URL of the run's store: file:///shared/run, s3://bucket/run",
    "node": "this node's name in the run (default: host name and random hex)",
    "syncer": "the node that closes all rounds, for stores without a conditional create; the same on every node",
    "role": "both, learner (never closes rounds), or either (closes for all while elected)",
    "handoff-every": "steps after which the whole state is kept in the mailbox, for a start without an adapter file",
    "sync-every": "optimizer steps between two merges of the same fragment",
    "fragments": "parts of the model merged in turn",
    "overlap-steps": "steps to train on while a snapshot is merged; null for no limit",
    "quorum-size": "snapshots that close a round",
    "grace-seconds": "how long a closer waits for others after quorum; null adapts",
    "delta-codec": "wire format of the deltas: BF16, F8_E4M3, INT8, F4, ...",
    "global-batch-size": "rows of one step that all live nodes share",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mlx-lm's command with ``arguments`` (default: the process's); the exit code."""
    ours = _parser()
    options, theirs = ours.parse_known_args(arguments)
    if options.help:
        print(ours.format_help(), "\nand the options of mlx_lm.lora:\n", stock.build_parser().format_help(), sep="\n")
        return 0
    try:
        with _set(stock, "train", _train(options, theirs)), _set(sys, "argv", ["mlx_lm.lora", *theirs]), _sigterm():
            stock.main()
    except GradientMailError as error:
        print(f"gradientmail_mlx.lora: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradientmail_mlx.lora",
        description="mlx_lm.lora as a node of a run. What is not given is taken from the environment "
        f"({PREFIX}MAILBOX, {PREFIX}SYNC_EVERY and so on), then from DiLoCo's defaults.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this, and mlx-lm's own options")
    for name, meaning in _OPTIONS.items():
        parser.add_argument(f"--{name}", help=meaning)
    parser.add_argument("--min-nodes", type=int, default=1, help="nodes to wait for before training starts")
    parser.add_argument("--max-batch-size", type=int, help="most rows of an iteration, whatever the share is")
    return parser


def _train(options: argparse.Namespace, theirs: Sequence[str]) -> object:
    """Our ``train`` with the run's settings, read before a model is loaded; mlx-lm's where nothing is trained."""
    if "--test" in theirs and "--train" not in theirs:
        return stock.train
    given = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in _OPTIONS}
    environment = {**os.environ, **{PREFIX + name.upper(): text for name, text in given.items() if text is not None}}
    return partial(
        train,
        mailbox=mailbox_from(environment),
        algorithm=algorithm_from(environment),
        node=environment.get(PREFIX + "NODE"),
        syncer=environment.get(PREFIX + "SYNCER"),
        role=role_from(None, environment),
        handoff_every=handoff_from(None, environment.get(PREFIX + "NODE"), environment),
        min_nodes=options.min_nodes,
        max_batch_size=options.max_batch_size,
    )


@contextmanager
def _set(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
