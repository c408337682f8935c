"""The commands of a study whose trials run one by one: ``plan``, ``run [--limit N]`` and ``table``."""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from benchmarks.quality.log import Row, append, missing, path_of, read
from benchmarks.quality.trial import Node, Trial

TIMED_STEPS = 20


class Played(Protocol):
    """A trial: what names its row, what a node trains in it, and what it costs."""

    @property
    def inner(self) -> Trial:
        """What a node trains."""
        ...

    @property
    def node_steps(self) -> int:
        """Optimizer steps of all nodes."""
        ...

    def fields(self) -> dict[str, object]:
        """The settings as JSON."""
        ...


T = TypeVar("T", bound=Played)


@dataclass(frozen=True, slots=True)
class Study(Generic[T]):
    """A study by its name in the logs; ``told`` says in a line what came of a trial, ``more`` are other tables."""

    name: str
    trials: Callable[[], Iterable[T]]
    run: Callable[[T], Row]
    told: Callable[[T, Row], str]
    table: Callable[[Iterable[Mapping[str, Any]]], str]
    more: Mapping[str, Callable[[], str]] = field(default_factory=dict)

    def left(self) -> list[T]:
        """The trials that have no row yet."""
        return missing(self.trials(), read(path_of(self.name)))

    def plan(self) -> str:
        """What is left, by the time of a few steps of one node."""
        torch.set_num_threads(1)
        node, left = Node(next(iter(self.trials())).inner, 0), self.left()
        node.step()
        started = time.process_time()
        for _ in range(TIMED_STEPS):
            node.step()
        each = (time.process_time() - started) / TIMED_STEPS
        steps = sum(trial.node_steps for trial in left)
        time_left = f"{steps} node steps of {1000 * each:.1f} ms: {steps * each / 60:.0f} min of one core"
        return f"{len(left)} trials, {time_left}"

    def work(self, limit: int | None) -> None:
        """Run what is left, in the order of the plan."""
        left = self.left()
        for number, trial in enumerate(left[:limit], 1):
            row = self.run(trial)
            append(path_of(self.name), row)
            print(f"{number}/{len(left)} {self.told(trial, row)}", flush=True)

    def main(self, description: str | None, arguments: Sequence[str] | None = None) -> None:
        """Parse the command line and do what it says."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("command", choices=("plan", "run", "table", *self.more))
        parser.add_argument("--limit", type=int, help="end after so many trials")
        options = parser.parse_args(arguments)
        match options.command:
            case "plan":
                print(self.plan())
            case "run":
                self.work(options.limit)
            case "table":
                print(self.table(read(path_of(self.name))))
            case other:
                print(self.more[other]())
