"""What commands share of talking to a person: lines that stay, and one that is written over with progress.

Progress appears on a terminal only; in a file or a pipe there are just the lines.
"""

import json
from pathlib import Path
from typing import TextIO

from gradientmail_core.errors import ConfigurationError

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


def write_json(path: Path, value: object) -> None:
    """Write ``value``; its directory is made. Raises :class:`ConfigurationError` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.", "Use another file.") from error
