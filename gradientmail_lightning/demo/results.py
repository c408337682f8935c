"""What the demo measured, as values; nothing in them is a setting or a guess.

Losses are means over the held-out sample in nats per byte. Seconds are wall-clock seconds since the first node of an
experiment took its first step, as that node measured them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve: held-out ``loss`` after ``step`` steps and ``seconds``."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True, slots=True)
class Mark:
    """What happened to ``node``, process ``pid``, when the observed node was at ``step``, after ``seconds``."""

    what: Literal["join", "kill"]
    node: str
    pid: int
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One training run: the curve of its first node, and what became of it.

    ``loss`` is that of the model the run ends with: the node's own when it trained alone, else the committed one, read
    from the mailbox. ``commits`` are counted in the mailbox; ``requests`` and ``bytes`` are all nodes' together, up to
    their last report. ``steps`` are each node's.
    """

    seed: int
    loss: float
    seconds: float
    curve: tuple[Point, ...]
    steps: dict[str, int]
    commits: int = 0
    requests: int = 0
    bytes: int = 0
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Results:
    """One node alone and nodes merged, for each seed; and the run that gains a node and loses one."""

    alone: tuple[Outcome, ...]
    merged: tuple[Outcome, ...]
    churn: Outcome
    seconds: float


def mean(outcomes: Iterable[Outcome], figure: Callable[[Outcome], float]) -> float:
    """The mean of a figure over runs."""
    return fmean(figure(outcome) for outcome in outcomes)


def mean_curve(outcomes: Sequence[Outcome]) -> tuple[Point, ...]:
    """The curves' means, point by point, as far as the shortest goes."""
    columns = zip(*(outcome.curve for outcome in outcomes), strict=False)
    return tuple(
        Point(points[0].step, fmean(point.seconds for point in points), fmean(point.loss for point in points))
        for points in columns
    )
