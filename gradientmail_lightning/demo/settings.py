"""What a node of the demo needs to know, and how it is told: one flag for each field, the same for every process.

The defaults were chosen by trying, on two processor cores: a rate that is best for one node alone, then the
interval and the outer optimizer for two. The outer momentum warms up, because a constant one overshoots for as
long as its average reaches back to the fast first steps, and a run of a few dozen rounds ends before it recovers.
"""

import argparse
from dataclasses import dataclass, fields

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.outer import Nesterov
from gradientmail_lightning.demo.model import LanguageModel, ModelSize

OUTER = Nesterov(lr=0.7, momentum=0.9, warmup=10.0)
LEASE_TIMEOUT_SECONDS = 6.0

HELP = {
    "steps": "optimizer steps of each node",
    "batch": "windows in a batch",
    "context": "bytes in a window",
    "width": "width of the model, a multiple of 32",
    "layers": "blocks of the model",
    "lr": "rate of the inner AdamW",
    "lr_warmup": "steps until it is reached",
    "sync_every": "steps between two merges of a fragment",
    "fragments": "parts of the model merged in turn",
    "evaluate_every": "steps between two points of a curve",
    "evaluation_windows": "held-out windows of each point",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Model, optimizer and merging, the same for one node alone and for nodes together."""

    steps: int = 240
    batch: int = 8
    context: int = 64
    width: int = 160
    layers: int = 4
    lr: float = 1e-3
    lr_warmup: int = 20
    sync_every: int = 20
    fragments: int = 1
    evaluate_every: int = 40
    evaluation_windows: int = 128

    @property
    def size(self) -> ModelSize:
        """The model's; raises :class:`ConfigurationError` if there is no such model."""
        return ModelSize(self.width, self.layers, self.context)

    def algorithm(self, nodes: int) -> DiLoCo:
        """How ``nodes`` nodes and one late one merge: a round waits for all that live, and training for the round.

        Raises :class:`ConfigurationError` for settings that cannot work.
        """
        return DiLoCo(
            sync_every=self.sync_every,
            fragments=self.fragments,
            overlap_steps=0,
            follow=False,
            quorum_size=nodes + 1,
            outer=OUTER,
        )

    def model(self) -> LanguageModel:
        """A model with random weights from torch's global generator."""
        return LanguageModel(self.size, self.lr, self.lr_warmup)

    def arguments(self) -> list[str]:
        """The flags from which :func:`settings_from` makes these settings again."""
        return [f"{_flag(field.name)}={getattr(self, field.name)!r}" for field in fields(self)]


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` a flag for each field."""
    group = parser.add_argument_group("model and training")
    for field in fields(Settings):
        kind = type(field.default)
        group.add_argument(
            _flag(field.name), type=kind, default=field.default, help=f"{HELP[field.name]} (default: %(default)s)"
        )


def settings_from(options: argparse.Namespace) -> Settings:
    """The settings that :func:`add_settings` made ``options`` hold."""
    return Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
