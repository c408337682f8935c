"""Metrics as TensorBoard scalars, over the run's own clock."""

import importlib
import os
from collections import defaultdict
from typing import Protocol, cast

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import Event, SessionEnded
from gradientmail_core.sinks.metrics import Measurement, measured
from gradientmail_core.sinks.sink import Sink


class Writer(Protocol):
    """What writes scalars: ``SummaryWriter`` of tensorboardX or of torch."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Add a point to a curve."""

    def flush(self) -> object:
        """Write what is held back."""


class ClosingWriter(Writer, Protocol):
    """A writer that may be closed, and begins another file if it is used again."""

    def close(self) -> object:
        """Write everything and end the file."""


class TensorBoard(Sink):
    """Write each metric of :mod:`gradientmail_core.sinks.metrics` as a scalar ``gradientmail/...``.

    ``target`` is a directory, for which tensorboardX must be installed, or a ``SummaryWriter`` of one's own (torch's,
    tensorboardX's). The horizontal axis is the run's clock in optimizer steps; counters are shown as their sums so
    far, distributions sample by sample, and labels follow the name: ``gradientmail/tokens/dropped/overlap``.

    Raises :class:`ConfigurationError` for a directory without tensorboardX.
    """

    def __init__(self, target: str | os.PathLike[str] | Writer) -> None:
        super().__init__()
        self._writer: Writer
        if isinstance(target, str | os.PathLike):
            self._writer = own = _writer(target)
            self._end = own.close
        else:
            self._writer = target
            self._end = target.flush
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._step = 0

    def write(self, event: Event) -> None:
        """Add a point for each number the event holds."""
        points = list(measured(event))
        self._step = max([self._step, *(int(point.value) for point in points if point.name == "step")])
        for point in points:
            self._add(point)
        if isinstance(event, SessionEnded):
            self._end()

    def _add(self, point: Measurement) -> None:
        tag = "/".join(("gradientmail", *point.name.split("."), *point.labels.values())).replace(" ", "_")
        value = point.value
        if point.metric.kind == "counter":
            self._sums[tag] += value
            value = self._sums[tag]
        self._writer.add_scalar(tag, value, self._step)


def _writer(directory: str | os.PathLike[str]) -> ClosingWriter:
    try:
        library = importlib.import_module("tensorboardX")
    except ImportError:
        raise ConfigurationError(
            "TensorBoard(directory) needs tensorboardX, which is not installed.",
            "Install gradientmail[tensorboard], or give a SummaryWriter of your own.",
        ) from None
    return cast(ClosingWriter, library.SummaryWriter(os.fspath(directory)))
