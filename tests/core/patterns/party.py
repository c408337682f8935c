"""Nodes of a run as patterns see them, on one mailbox and virtual time; who lives is for the test to say."""

import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gradientmail_core.events import Event
from gradientmail_core.mailbox import MemoryMailbox, ReadBackMailbox
from gradientmail_core.mailbox.base import StoreClass
from gradientmail_core.patterns.party import Party
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually

T = TypeVar("T")

RUN = "5a" * 16


class Town:
    """A mailbox, and the nodes that share it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.mailbox = MemoryMailbox("town")
        self.dead: set[str] = set()
        self.events: list[Event] = []
        self.processes = 0

    def party(self, node: str, store: StoreClass = "atomic") -> Party:
        """A process of a node; another incarnation with each call."""
        self.processes += 1
        clock = VirtualClock(self.loop)
        entropy = random.Random(self.processes)
        return Party(
            run=RUN,
            node=node,
            incarnation=f"{self.processes:016x}",
            mailbox=ReadBackMailbox(self.mailbox, clock) if store == "racy" else self.mailbox,
            clock=clock,
            period=2.0,
            nonce=lambda: f"{entropy.getrandbits(64):016x}",
            alive=lambda name, since: name not in self.dead,
            emit=self.events.append,
            store=store,
        )

    def keys(self, prefix: str) -> list[str]:
        """Every key below a prefix."""
        return [entry.key for entry in self.mailbox._entries(prefix, "")]


def in_town(main: Callable[[Town], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` to its end on virtual time."""
    return run_virtually(lambda loop: main(Town(loop)))
