"""Scalars in a real event file, and a writer of one's own."""

import importlib
import struct
from pathlib import Path
from typing import Any

import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import FragmentAligned, RunJoined, SessionEnded, TokensBooked
from gradientmail_core.sinks import TensorBoard

Points = dict[str, list[Any]]


def scalars(directory: Path) -> Points:
    """The curves in an event file: records framed by length and two checksums (TFRecord)."""
    protocol = pytest.importorskip("tensorboardX.proto.event_pb2")
    found: Points = {}
    (path,) = directory.glob("events.out.tfevents.*")
    body = path.read_bytes()
    while body:
        (length,) = struct.unpack_from("<Q", body)
        event = protocol.Event.FromString(body[12 : 12 + length])
        body = body[16 + length :]
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, pytest.approx(value.simple_value)))
    return found


def test_metrics_are_curves_over_the_runs_clock(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    sink = TensorBoard(tmp_path)
    sink(RunJoined("5a", "a", 30, 3, ()))
    for step in (40, 50):
        sink(TokensBooked(0, step // 5, 80, 16, (("rolled back", 2),)))
        sink(FragmentAligned(0, step // 5, step, 2, 160, True, 0.5))
    sink(SessionEnded("a", 5, ""))
    curves = scalars(tmp_path)
    assert curves["gradientmail/tokens/merged"] == [(30, 80.0), (40, 160.0)], "counters add up"
    assert curves["gradientmail/tokens/dropped/rolled_back"] == [(30, 2.0), (40, 4.0)]
    assert curves["gradientmail/rounds/cosine"] == [(40, 0.5), (50, 0.5)]
    assert curves["gradientmail/step"] == [(30, 30.0), (40, 40.0), (50, 50.0)]


class Notes:
    """A writer that takes notes."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []
        self.flushed = 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        self.flushed += 1


def test_a_writer_of_ones_own_is_written_to() -> None:
    notes = Notes()
    sink = TensorBoard(notes)
    sink(FragmentAligned(0, 8, 40, 2, 160, True, None))
    sink(SessionEnded("a", 5, ""))
    assert ("gradientmail/rounds/aligned", 1.0, 40) in notes.points and notes.flushed == 1


def test_without_the_library_a_directory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigurationError, match="tensorboardX"):
        TensorBoard(tmp_path)
