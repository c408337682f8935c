"""``gradientmail.json`` beside a Trainer's checkpoint: what is needed to go on exactly where it was written.

The Trainer has a way of its own to keep a callback's state, and it does not suit: a checkpoint that was written
without the callback cannot be resumed with it, and the callback is replaced by another object. A file of our own is
simply there or not. It is read like anything that somebody else may have written: a file that is not what it should
be counts as none.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.keys import checked_node

logger = logging.getLogger("gradientmail")

FILE: Final = "gradientmail.json"
_BYTES_MOST: Final = 1 << 36  # residuals of error feedback are as large as the model


@dataclass(frozen=True, slots=True)
class Progress:
    """A node's name, its session's state and where it stands in its data; empty where there was nothing to keep."""

    node: str
    session: Mapping[str, object]
    stream: Mapping[str, object]


def write_progress(folder: Path, node: str, run: Mapping[str, object], stream: Mapping[str, object]) -> None:
    """Leave the file in ``folder``, if that exists; ``run`` is what the membership says of its progress.

    Warns where another node has left one: two nodes that write one checkpoint leave parts of each.
    """
    if folder.is_dir():
        other = read_progress(folder)
        if other is not None and other.node != node:
            logger.warning("%s is node %s's, and %s wrote over it: give each an output_dir", folder, other.node, node)
        partial = folder / f"{FILE}.partial"
        partial.write_text(json.dumps({"node": node, **run, "stream": stream}, indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / FILE)


def read_progress(folder: Path) -> Progress | None:
    """What :func:`write_progress` left in ``folder``; None if there is nothing that can be used."""
    path = folder / FILE
    if not path.is_file():
        return None
    found = _parsed(path)
    if found is None:
        logger.warning("%s is not what a GradientMail node writes: resuming without it", path)
    return found


def _parsed(path: Path) -> Progress | None:
    try:
        if path.stat().st_size > _BYTES_MOST:
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    node, session, stream = content.get("node"), content.get("session", {}), content.get("stream", {})
    if not isinstance(node, str) or not isinstance(session, dict) or not isinstance(stream, dict):
        return None
    try:
        return Progress(checked_node(node), session, stream)
    except ConfigurationError:
        return None
