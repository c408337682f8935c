"""What a node of the demo tells the process that started it: one JSON object a line, on standard output.

A line that is none of these is no message; whatever a library prints in between is passed over.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Started:
    """Training starts, from the run's ``step`` if the node joined one."""

    step: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """The node is at ``step`` after ``seconds`` of training, with ``loss`` on its last batch.

    ``rounds`` counts the run's commits; ``requests`` and ``bytes`` (both ways) are what the mailbox has cost this
    node so far.
    """

    step: int
    seconds: float
    loss: float
    rounds: int = 0
    requests: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Held-out ``loss``, in nats per byte, of the node's model at ``step`` after ``seconds`` of training."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True, slots=True)
class Said:
    """Something a person wants to know: a node is gone, a round was taken over."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Training is over at ``step`` and the run is left, after ``seconds``."""

    step: int
    seconds: float


Message: TypeAlias = Started | Stepped | Evaluated | Said | Ended

_KINDS = {kind.__name__.lower(): kind for kind in (Started, Stepped, Evaluated, Said, Ended)}


def to_line(message: Message) -> str:
    """The message as one line of JSON."""
    return json.dumps({"kind": type(message).__name__.lower(), **dataclasses.asdict(message)})


def from_line(line: str) -> Message | None:
    """The message that a line holds, or None."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, Mapping):
        return None
    kind = _KINDS.get(str(fields.get("kind")))
    values = {name: value for name, value in fields.items() if name != "kind"}
    try:
        return kind(**values) if kind else None
    except TypeError:
        return None
