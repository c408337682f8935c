"""The demo's three experiments, as real processes: alone, merged, and through a late join and a SIGKILL.

All nodes of one experiment take the same number of steps of the same size from the same start; the first one's
model is evaluated on the way. Nodes of a run are told a mailbox and nothing of each other.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, assert_never
from urllib.parse import urlsplit, urlunsplit

from torch import Tensor

from gradientmail_core.errors import RunMismatch
from gradientmail_core.mailbox import open_mailbox
from gradientmail_core.session import align
from gradientmail_lightning.demo.messages import Ended, Evaluated, Message, Said, Started, Stepped
from gradientmail_lightning.demo.model import held_out_loss
from gradientmail_lightning.demo.processes import Arrival, Processes
from gradientmail_lightning.demo.results import Mark, Outcome, Point
from gradientmail_lightning.demo.settings import Settings

JOIN_AT = 0.25
"""Part of the run after which one more node is started; it is there some seconds later."""
KILL_AT = 0.6
"""Part of the run after which a node is killed, or later if the late one has not joined yet."""
FIRST = "a"
"""The node whose model is evaluated on the way."""


class Show(Protocol):
    """Where an experiment tells what happens."""

    def line(self, text: str) -> None:
        """Say something that happened."""
        ...

    def progress(self, latest: Mapping[str, Stepped]) -> None:
        """Say how far every node is."""
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """What one experiment's nodes have told so far, by node; ``curves`` only of those that evaluate."""

    curves: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    latest: Mapping[str, Stepped] = field(default_factory=dict)
    first_steps: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, Ended] = field(default_factory=dict)

    def step(self, node: str) -> int:
        """The step of the node's last report; 0 before the first."""
        return self.latest[node].step if node in self.latest else 0


def seen_after(seen: Seen, node: str, message: Message) -> Seen:
    """``seen`` with one more message."""
    match message:
        case Started(step):
            return replace(seen, first_steps={**seen.first_steps, node: step})
        case Stepped():
            return replace(seen, latest={**seen.latest, node: message})
        case Evaluated(step, seconds, loss):
            curve = (*seen.curves.get(node, ()), Point(step, seconds, loss))
            return replace(seen, curves={**seen.curves, node: curve})
        case Ended():
            return replace(seen, ended={**seen.ended, node: message})
        case Said():
            return seen
        case _:
            assert_never(message)


@dataclass(frozen=True, slots=True)
class Laboratory:
    """Where experiments run: every node's settings, how many start together, a folder for logs, and who is told."""

    settings: Settings
    nodes: int
    logs: Path
    show: Show

    def alone(self, seeds: Sequence[int]) -> tuple[Outcome, ...]:
        """One node for each seed, in plain Lightning, as many at a time as are merged: on the same machine."""
        waiting = [(f"seed-{seed}", seed) for seed in seeds]
        with Processes(self.logs / "alone") as processes:

            def start_next() -> None:
                name, seed = waiting.pop(0)
                self._start(processes, name, seed, None)

            def react(seen: Seen, arrival: Arrival) -> None:
                if arrival.message is None and waiting:
                    start_next()

            for _ in seeds[: self.nodes]:
                start_next()
            seen = self._watch(processes, react)
        return tuple(self._outcome(seen, f"seed-{seed}", seed, None, []) for seed in seeds)

    def merged(self, seed: int, mailbox: str, held_out: Sequence[Tensor]) -> Outcome:
        """Nodes that start together and share ``mailbox``."""
        with Processes(self.logs / f"merged-{seed}") as processes:
            for name in node_names(self.nodes):
                self._start(processes, name, seed, mailbox)
            seen = self._watch(processes)
        return self._outcome(seen, FIRST, seed, mailbox, held_out)

    def churn(self, seed: int, mailbox: str, held_out: Sequence[Tensor]) -> Outcome:
        """The same, but one more node joins in the middle, and then one of the first is killed."""
        *names, late = node_names(self.nodes + 1)
        doomed, pids, released, marks = names[-1], dict[str, int](), set[str](), list[Mark]()
        with Processes(self.logs / f"churn-{seed}") as processes:

            def react(seen: Seen, arrival: Arrival) -> None:
                done = seen.step(FIRST) / self.settings.steps
                if done >= JOIN_AT and late not in released:
                    released.add(late)
                    processes.release(late)
                if not marks and late in seen.first_steps:
                    marks.append(_mark("join", late, pids[late], seen.latest[FIRST]))
                if len(marks) == 1 and done >= KILL_AT:
                    marks.append(_mark("kill", doomed, processes.kill(doomed), seen.latest[FIRST]))
                    self.show.line(f"killed {doomed}, pid {pids[doomed]}, with SIGKILL at step {seen.step(FIRST)}")

            for name in names:
                pids[name] = self._start(processes, name, seed, mailbox)
            pids[late] = self._start(processes, late, seed, mailbox, "--late")
            seen = self._watch(processes, react)
        return replace(self._outcome(seen, FIRST, seed, mailbox, held_out), marks=tuple(marks))

    def _start(self, processes: Processes, name: str, seed: int, mailbox: str | None, *more: str) -> int:
        arguments = [f"--seed={seed}", *self.settings.arguments(), *more]
        if mailbox is not None:
            arguments += [f"--mailbox={mailbox}", f"--nodes={self.nodes}"]
        if mailbox is None or name == FIRST:
            arguments.append("--curve")
        pid = processes.start(name, arguments)
        self.show.line(f"started {name}, pid {pid}" + (", which waits to join" if "--late" in more else ""))
        return pid

    def _watch(self, processes: Processes, react: Callable[[Seen, Arrival], None] | None = None) -> Seen:
        """Follow the nodes to their end; ``react`` is called after every arrival."""
        seen = Seen()
        for arrival in processes.arrivals():
            if arrival.message is not None:
                seen = seen_after(seen, arrival.node, arrival.message)
                self._tell(seen, arrival.node, arrival.message)
            if react is not None:
                react(seen, arrival)
        return seen

    def _tell(self, seen: Seen, node: str, message: Message) -> None:
        match message:
            case Stepped():
                self.show.progress(seen.latest)
            case Evaluated(step, _, loss):
                self.show.line(f"{node}: step {step} of {self.settings.steps}, held-out loss {loss:.3f}")
            case Said(text):
                self.show.line(text if text.startswith(node) else f"{node}: {text}")
            case Started() | Ended():
                pass
            case _:
                assert_never(message)

    def _outcome(self, seen: Seen, node: str, seed: int, mailbox: str | None, held_out: Sequence[Tensor]) -> Outcome:
        """What the run came to; with a mailbox, the loss is that of the parameters committed there."""
        curve = seen.curves.get(node, ())
        loss = curve[-1].loss if mailbox is None else committed_loss(self.settings, mailbox, held_out)
        return Outcome(
            seed=seed,
            loss=loss,
            seconds=seen.ended[node].seconds,
            curve=curve,
            steps={name: ended.step - seen.first_steps[name] for name, ended in seen.ended.items()},
            commits=0 if mailbox is None else asyncio.run(count_commits(mailbox)),
            requests=sum(latest.requests for latest in seen.latest.values()),
            bytes=sum(latest.bytes for latest in seen.latest.values()),
        )


def node_names(count: int) -> list[str]:
    """``a``, ``b``, …; the first is the one that is evaluated on the way."""
    return [FIRST, *(chr(ord(FIRST) + number) for number in range(1, count))]


def committed_loss(settings: Settings, mailbox: str, held_out: Sequence[Tensor]) -> float:
    """Held-out loss of the newest committed parameters in ``mailbox``."""
    model = settings.model()
    align(model, mailbox=mailbox)
    return held_out_loss(model, held_out)


async def count_commits(mailbox: str) -> int:
    """Round records in ``mailbox``; a round that was decided twice over would count twice."""
    store = open_mailbox(mailbox)
    try:
        return len([entry async for entry in store.list("tape/")])
    finally:
        await store.close()


async def check_unused(mailbox: str) -> None:
    """Raise :class:`RunMismatch` if ``mailbox`` already holds a run, which the demo would only join."""
    store = open_mailbox(mailbox)
    try:
        if await store.get("manifest.json") is not None:
            raise RunMismatch(f"There is already a run at {store.url}.", "Give another --mailbox.")
        async for entry in store.list(""):
            raise RunMismatch(f"{store.url} is in use: it holds {entry.key!r}.", "Give an empty --mailbox.")
    finally:
        await store.close()


def below(mailbox: str, name: str) -> str:
    """The URL of the prefix ``name`` below that of ``mailbox``, its query kept."""
    parts = urlsplit(mailbox)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def _mark(what: Literal["join", "kill"], node: str, pid: int, observed: Stepped) -> Mark:
    return Mark(what, node, pid, observed.step, observed.seconds)
