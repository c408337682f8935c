"""The node processes of one experiment: started, watched, killed by their own pid, and never left behind.

Each node is a process of its own that gets its settings on the command line. A thread for each reads its
messages into one queue, with the time of arrival. Leaving the context ends whatever still runs, first by asking
(SIGTERM, on which a node leaves its run in order), then by SIGKILL. Nodes are in process groups of their own, so
that Ctrl-C reaches the one who started them and they are asked once.
"""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from gradientmail_core.errors import GradientMailError
from gradientmail_lightning.demo.messages import Message, from_line

LEAVE_SECONDS = 15.0


class NodeFailed(GradientMailError):
    """A node process ended by itself before its time; the cause quotes what it said last."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A node's message, ``seconds`` after the experiment began; None when its output ended, and it with it."""

    node: str
    seconds: float
    message: Message | None


@dataclass(slots=True)
class Processes:
    """The running nodes by name. Each one's standard error is kept in ``logs``."""

    logs: Path
    _running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _arrivals: queue.SimpleQueue[Arrival] = field(default_factory=queue.SimpleQueue)
    _readers: list[threading.Thread] = field(default_factory=list)
    _killed: set[str] = field(default_factory=set)
    _began: float = field(default_factory=time.monotonic)

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.terminate()
        for process in self._running.values():
            _reap(process)
        for reader in self._readers:
            reader.join()

    def start(self, node: str, arguments: Sequence[str]) -> int:
        """Start a node; its pid."""
        command = [sys.executable, "-m", "gradientmail_lightning.demo.node", f"--name={node}", *arguments]
        with (self.logs / f"{node}.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        assert process.stdout is not None
        self._running[node] = process
        self._readers.append(threading.Thread(target=self._read, args=(node, process.stdout), daemon=True))
        self._readers[-1].start()
        return process.pid

    def release(self, node: str) -> None:
        """Let a node that was started with ``--late`` join."""
        gate = self._running[node].stdin
        assert gate is not None
        with suppress(BrokenPipeError):
            gate.write("\n")
            gate.flush()

    def kill(self, node: str) -> int:
        """End a node with SIGKILL, as a power cut would; its pid."""
        self._killed.add(node)
        self._running[node].kill()
        return self._running[node].pid

    def arrivals(self) -> Iterator[Arrival]:
        """Every message as it arrives, until the last node has ended.

        Raises :class:`NodeFailed` if one ends with an error that was not killed here.
        """
        ended: set[str] = set()
        while ended < self._running.keys():
            arrival = self._arrivals.get()
            if arrival.message is None:
                ended.add(arrival.node)
                self._check(arrival.node)
            yield arrival

    def _read(self, node: str, output: TextIO) -> None:
        with output:
            for line in output:
                message = from_line(line)
                if message is not None:
                    self._arrive(node, message)
        self._arrive(node, None)

    def _arrive(self, node: str, message: Message | None) -> None:
        self._arrivals.put(Arrival(node, time.monotonic() - self._began, message))

    def _check(self, node: str) -> None:
        code = self._running[node].wait()
        if code != 0 and node not in self._killed:
            log = self.logs / f"{node}.log"
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise NodeFailed(
                f"Node {node} ended with code {code}: {said[-1] if said else 'it said nothing'}", f"See {log}."
            )


def _reap(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
