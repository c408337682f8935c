"""Every event as one line of JSON: what happened, when, and all its fields."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from gradientmail_core.events import Event
from gradientmail_core.sinks.sink import Sink


class JsonLines(Sink):
    """Append each event to ``path`` as ``{"time": ..., "event": "FragmentAligned", ...}``.

    ``time`` is in seconds since 1970 of this machine's clock, ``event`` the event's name, the rest are its fields; a
    number that is not finite becomes null. ``constant`` fields, such as ``node="a"``, stand in every line and win. A
    line is appended in one write and nothing is held open, so files can be moved away and several nodes may share one.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time, **constant: str | int | float
    ) -> None:
        super().__init__()
        self._path = Path(path)
        self._clock = clock
        self._constant = constant

    def write(self, event: Event) -> None:
        """Append one line; raises OSError where that fails."""
        fields = {"time": round(self._clock(), 3), "event": type(event).__name__} | asdict(event) | self._constant
        line = json.dumps({name: _finite(value) for name, value in fields.items()}, separators=(",", ":"))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
