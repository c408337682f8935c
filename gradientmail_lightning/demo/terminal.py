"""Where the demo talks to a person: a line for each thing that happens, and one that is written over with progress.

The progress line appears on a terminal only; in a file or a pipe there are just the lines.
"""

import time
from collections.abc import Mapping
from typing import TextIO

from gradientmail_lightning.demo.messages import Stepped

CLEAR = "\r\x1b[2K"


class Terminal:
    """Lines on ``out``, each with the minutes and seconds since this object was made."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since this object was made."""
        return time.monotonic() - self._began

    def text(self, text: str) -> None:
        """Text as it is, on lines of its own."""
        self._write(text + "\n")

    def line(self, text: str) -> None:
        """Something that happened."""
        self._write(f"  {clock(self.seconds)}  {text}\n")

    def progress(self, latest: Mapping[str, Stepped]) -> None:
        """How far every node is, in place of the last such line."""
        if self._live:
            nodes = "   ".join(f"{name} {stepped.step} (loss {stepped.loss:.2f})" for name, stepped in latest.items())
            rounds = max(stepped.rounds for stepped in latest.values())
            self._write(f"  {clock(self.seconds)}  {nodes}" + (f"   round {rounds}" if rounds else ""))

    def _write(self, text: str) -> None:
        self._out.write((CLEAR if self._live else "") + text)
        self._out.flush()


def clock(seconds: float) -> str:
    """Minutes and seconds, as ``03:07``."""
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
