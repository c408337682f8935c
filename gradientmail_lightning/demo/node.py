"""One node: train the demo's model on its own shuffle of the text, alone or with others, and report on it.

    python -m gradientmail_lightning.demo.node --name a --mailbox file:///tmp/run --nodes 2

All that makes it a node of a run is the strategy that is given to the trainer. Without ``--mailbox`` the same
model trains on the same data in plain Lightning.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from gradientmail_core.errors import GradientMailError
from gradientmail_core.events import NodeAppeared, NodeGone
from gradientmail_lightning import GradientMailStrategy
from gradientmail_lightning.demo.corpus import Corpus, Windows, read_corpus, sample
from gradientmail_lightning.demo.messages import Ended, Evaluated, Message, Said, Started, Stepped, to_line
from gradientmail_lightning.demo.model import held_out_loss
from gradientmail_lightning.demo.settings import LEASE_TIMEOUT_SECONDS, Settings, add_settings, settings_from

REPORT_EVERY_STEPS = 5


@dataclass(frozen=True, slots=True)
class Role:
    """One node: its name, its seed, the run's mailbox (None: alone), and how many ``nodes`` start the run together.

    A ``late`` node waits for nobody; with ``curve`` the held-out loss is reported on the way.
    """

    name: str
    seed: int
    mailbox: str | None
    nodes: int
    late: bool
    curve: bool


def train(settings: Settings, role: Role) -> None:
    """Train until the run has made ``settings.steps`` steps.

    Raises what :meth:`Session.join` raises.
    """
    seed_everything(role.seed, verbose=False)
    corpus = read_corpus()
    report = Report(settings, held_out_windows(corpus, settings) if role.curve else [])
    if role.late:
        sys.stdin.readline()
    trainer = Trainer(
        max_steps=settings.steps,
        strategy="auto" if role.mailbox is None else merging(settings, role, role.mailbox),
        callbacks=[report],
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        log_every_n_steps=REPORT_EVERY_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    windows = Windows(corpus.train, settings.context + 1)
    trainer.fit(settings.model(), DataLoader(windows, settings.batch, shuffle=True, drop_last=True))
    report.end()


def merging(settings: Settings, role: Role, mailbox: str) -> Strategy:
    """The strategy that makes a trainer a node of the run in ``mailbox``."""
    return GradientMailStrategy(
        mailbox=mailbox,
        algorithm=settings.algorithm(role.nodes),
        node=role.name,
        min_nodes=1 if role.late else role.nodes,
        lease_timeout=LEASE_TIMEOUT_SECONDS,
    )


def held_out_windows(corpus: Corpus, settings: Settings) -> list[Tensor]:
    """The sample that every loss of the demo is measured on."""
    return sample(corpus.held_out, settings.context + 1, settings.evaluation_windows)


class Report(Callback):
    """Prints a message for whatever the demo shows. A node that joins late counts from the run's step on."""

    def __init__(self, settings: Settings, windows: Sequence[Tensor]) -> None:
        self._settings, self._windows = settings, windows
        self._step = 0
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._step = trainer.global_step
        self._began = time.monotonic()
        say(Started(self._step))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Report the step, and evaluate if it is time."""
        self._step = trainer.global_step
        if self._step % REPORT_EVERY_STEPS == 0:
            say(self._stepped(trainer.callback_metrics))
        if self._windows and self._step % self._settings.evaluate_every == 0:
            say(Evaluated(self._step, self._seconds(), held_out_loss(pl_module, self._windows)))

    def end(self) -> None:
        """The run is left and the model is final."""
        say(Ended(self._step, self._seconds()))

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _stepped(self, figures: Mapping[str, Tensor]) -> Stepped:
        cost = [figures.get(f"gradientmail/{name}", 0) for name in ("round", "requests", "bytes_up", "bytes_down")]
        rounds, requests, up, down = map(int, cost)
        return Stepped(self._step, self._seconds(), float(figures["loss"]), rounds, requests, up + down)


class Relay(logging.Handler):
    """Passes what the library logs on as a message, but for what others say of themselves."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record of the log."""
        match record.args:
            case (NodeAppeared() | NodeGone(left=True),):
                pass
            case _:
                say(Said(record.getMessage()))


def say(message: Message) -> None:
    """Print the message."""
    print(to_line(message), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one node; the exit code. What went wrong stands on standard error, in a sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m gradientmail_lightning.demo.node", description="One node of a run."
    )
    parser.add_argument("--name", required=True, help="the node's name in the run")
    parser.add_argument("--mailbox", help="URL of the run's mailbox; without it the node trains alone")
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes start together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--late", action="store_true", help="join when a line is read from standard input")
    parser.add_argument("--curve", action="store_true", help="evaluate on held-out text on the way")
    add_settings(parser)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    quiet()
    try:
        train(settings_from(options), Role(**{field.name: getattr(options, field.name) for field in fields(Role)}))
    except GradientMailError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def quiet() -> None:
    """Leave the terminal to the messages: the library's log becomes some, Lightning's hints are dropped."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    logger = logging.getLogger("gradientmail")
    logger.setLevel(logging.INFO)
    logger.addHandler(Relay())


if __name__ == "__main__":
    sys.exit(main())
