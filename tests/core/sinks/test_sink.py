"""A sink that cannot write says so once and harms nothing."""

import logging

import pytest

from gradientmail_core.events import Event, NodeAppeared, emitter
from gradientmail_core.sinks.sink import Sink


class Full(Sink):
    """Fails until it is given room."""

    def __init__(self) -> None:
        super().__init__()
        self.room = False
        self.written: list[Event] = []

    def write(self, event: Event) -> None:
        if not self.room:
            raise OSError("no space left")
        self.written.append(event)


def test_a_failing_sink_is_reported_once_tried_again_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    sink, seen = Full(), list[Event]()
    emit = emitter([sink, seen.append])
    with caplog.at_level(logging.WARNING, "gradientmail"):
        for _ in range(3):
            emit(NodeAppeared("b"))
    assert [record.getMessage() for record in caplog.records] == ["Full cannot write: no space left"]
    sink.room = True
    emit(NodeAppeared("c"))
    assert sink.written == [NodeAppeared("c")] and len(seen) == 4
