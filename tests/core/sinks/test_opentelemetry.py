"""Instruments of the real OpenTelemetry SDK, and no error where nobody set one up."""

import importlib
from typing import Any

import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import FragmentAligned, RoundCommitted, SnapshotRefused
from gradientmail_core.sinks import OpenTelemetry
from gradientmail_core.sinks.metrics import METRICS


def collected(reader: Any) -> dict[str, Any]:
    """By name, the metric as the SDK holds it."""
    data = reader.get_metrics_data()
    return {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_instruments_count_hold_and_sample() -> None:
    pytest.importorskip("opentelemetry.sdk")
    sdk = importlib.import_module("opentelemetry.sdk.metrics")
    reader = importlib.import_module("opentelemetry.sdk.metrics.export").InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    sink = OpenTelemetry(provider.get_meter("test"), node="a")
    for round in (8, 10):
        sink(FragmentAligned(0, round, 5 * round, 2, 160, True, 0.5))
        sink(RoundCommitted(0, round, ("a", "b"), (), 0.5, 0.25))
        sink(SnapshotRefused("a", 0, round, "stale"))
    metrics = collected(reader)
    assert {"gradientmail.step", "gradientmail.tokens.run"} <= metrics.keys()
    assert metrics.keys() <= {f"gradientmail.{metric.name}" for metric in METRICS}
    (tokens,) = metrics["gradientmail.tokens.run"].data.data_points
    assert tokens.value == 320 and dict(tokens.attributes) == {"node": "a"}
    (step,) = metrics["gradientmail.step"].data.data_points
    assert step.value == 50 and metrics["gradientmail.step"].unit == "{step}"
    (closing,) = metrics["gradientmail.rounds.closing"].data.data_points
    assert closing.count == 2 and closing.sum == 0.5
    (refused,) = metrics["gradientmail.snapshots.refused"].data.data_points
    assert refused.value == 2 and dict(refused.attributes) == {"node": "a", "reason": "stale"}
    provider.shutdown()


def test_without_a_meter_the_global_one_is_taken() -> None:
    pytest.importorskip("opentelemetry.metrics")
    OpenTelemetry()(RoundCommitted(0, 8, ("a",), (), None, 0.1))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigurationError, match="gradientmail\\[otel\\]"):
        OpenTelemetry()
