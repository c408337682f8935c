"""Metrics as OpenTelemetry instruments, through the library's own API: where they go is the application's to say."""

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import Event
from gradientmail_core.sinks.metrics import METRICS, Metric, measured
from gradientmail_core.sinks.sink import Sink


class Counter(Protocol):
    """An instrument that adds up."""

    def add(self, amount: float, attributes: Mapping[str, str]) -> None:
        """Add to the series of these attributes."""


class Recorder(Protocol):
    """A gauge."""

    def set(self, amount: float, attributes: Mapping[str, str]) -> None:
        """Set the series of these attributes."""


class Histogram(Protocol):
    """An instrument that takes samples."""

    def record(self, amount: float, attributes: Mapping[str, str]) -> None:
        """Take a sample."""


class Meter(Protocol):
    """What makes instruments: ``opentelemetry.metrics.Meter``."""

    def create_counter(self, name: str, unit: str, description: str) -> Counter:
        """An instrument that adds up."""

    def create_gauge(self, name: str, unit: str, description: str) -> Recorder:
        """An instrument that holds a value."""

    def create_histogram(self, name: str, unit: str, description: str) -> Histogram:
        """An instrument that takes samples."""


class OpenTelemetry(Sink):
    """Record each metric of :mod:`gradientmail_core.sinks.metrics` with an instrument ``gradientmail....``.

    ``meter`` is one of the OpenTelemetry API, by default that of the global meter provider under the name
    ``gradientmail``. ``attributes``, such as ``node="a"``, stand with every value.

    Raises :class:`ConfigurationError` without a meter where the API is not installed.
    """

    def __init__(self, meter: Meter | None = None, **attributes: str) -> None:
        super().__init__()
        self._attributes = attributes
        meter = _global_meter() if meter is None else meter
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Recorder] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            self._add(meter, metric)

    def _add(self, meter: Meter, metric: Metric) -> None:
        described = f"gradientmail.{metric.name}", metric.unit, metric.description
        match metric.kind:
            case "counter":
                self._counters[metric.name] = meter.create_counter(*described)
            case "gauge":
                self._gauges[metric.name] = meter.create_gauge(*described)
            case "distribution":
                self._histograms[metric.name] = meter.create_histogram(*described)

    def write(self, event: Event) -> None:
        """Record each number the event holds."""
        for point in measured(event):
            attributes = {**point.labels, **self._attributes}
            match point.metric.kind:
                case "counter":
                    self._counters[point.name].add(point.value, attributes)
                case "gauge":
                    self._gauges[point.name].set(point.value, attributes)
                case "distribution":
                    self._histograms[point.name].record(point.value, attributes)


def _global_meter() -> Meter:
    try:
        library = importlib.import_module("opentelemetry.metrics")
    except ImportError:
        raise ConfigurationError(
            "OpenTelemetry() needs the OpenTelemetry API, which is not installed.",
            "Install gradientmail[otel], or leave this sink out.",
        ) from None
    return cast(Meter, library.get_meter("gradientmail"))
