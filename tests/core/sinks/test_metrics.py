"""Metrics: every value has a declared name, every name a source, and the documentation lists just these."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from gradientmail_core.events import Event, FragmentAligned, NodeGone, SnapshotRefused, TokensBooked
from gradientmail_core.sinks.metrics import METRICS, NAMED, Measurement, measured

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "events.md"
VALUES: dict[str, Any] = {
    "int": 3, "float": 0.5, "str": "a", "bool": True, "float | None": 0.25,
    "tuple[str, ...]": ("a", "b"), "tuple[tuple[str, int], ...]": (("late", 7),),
}  # fmt: skip


def sample(kind: type) -> Any:
    """An event of a kind, every field filled."""
    hints = kind.__annotations__
    return kind(
        **{name: VALUES[hint.__name__ if isinstance(hint, type) else str(hint)] for name, hint in hints.items()}
    )


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__name__)
def test_every_event_can_be_measured(kind: type) -> None:
    for point in measured(sample(kind)):
        assert point.metric is NAMED[point.name]


def test_every_metric_comes_from_some_event() -> None:
    assert {point.name for kind in get_args(Event) for point in measured(sample(kind))} == NAMED.keys()
    assert len(NAMED) == len(METRICS)


def test_labels_tell_causes_apart_and_what_is_not_known_is_left_out() -> None:
    booked = list(measured(TokensBooked(1, 9, 80, 16, (("late", 7), ("overlap", 2)))))
    assert Measurement("tokens.dropped", 7.0, {"cause": "late"}) in booked
    assert Measurement("tokens.carried", 16.0, {"fragment": "1"}) in booked
    refused = list(measured(SnapshotRefused("a", 0, 9, "stale")))
    assert refused == [Measurement("snapshots.refused", 1.0, {"reason": "stale"})]
    alone = measured(FragmentAligned(0, 9, 40, 1, 80, True, None))
    assert "rounds.cosine" not in {point.name for point in alone}
    assert list(measured(NodeGone("b", left=True))) == [Measurement("nodes.gone", 1.0)]


def test_the_page_lists_every_metric_and_every_event() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `gradientmail\.([\w.]+)` \| (\w+) \| (\S+) \| (.+) \|$", page, re.MULTILINE)
    assert rows == [(metric.name, metric.kind, metric.unit, metric.description) for metric in METRICS]
    told = set(re.findall(r"^\| `([A-Z]\w+)` \|", page, re.MULTILINE))
    assert told == {kind.__name__ for kind in get_args(Event)}, "say in docs/events.md what a new event means"
