"""What commands share of talking to a person: lines that stay, and one that is written over with progress.

Progress appears on a terminal only; in a file or a pipe there are just the lines.
"""

from typing import TextIO

CLEAR = "\r\x1b[2K"


class Console:
    """Lines on ``out``."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()

    def line(self, text: str) -> None:
        """Text that stays."""
        self._write(text + "\n")

    def progress(self, text: str) -> None:
        """What is going on, in place of the last such line."""
        if self._live:
            self._write(f"  {text} …")

    def _write(self, text: str) -> None:
        self._out.write((CLEAR if self._live else "") + text)
        self._out.flush()
