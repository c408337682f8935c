"""Simulated runs that are looked at from outside, on virtual time."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.engine.leftovers import Leftovers, judged, looked_at, removed
from gradientmail_core.engine.run import Host
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.gossip import SimulatedGossip
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.store import SimulatedStore, Weather
from gradientmail_core.sim.world import SimulatedNode

T = TypeVar("T")

SETTINGS = DiLoCo(sync_every=20, fragments=2, grace_seconds=0.5)
GOSSIP = FactoredGossip.global_m1(sync_every=10, fragments=2)
LEASE = 12.0


class Place:
    """A store whose clock is virtual time, nodes on it, and a visitor."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.shared = MemoryMailbox("run", loop.time)
        self.count = 0

    def node(self, name: str, *, steps: int = 100, settings: DiLoCo = SETTINGS, **options: Any) -> SimulatedNode:
        self.count += 1
        clock = VirtualClock(self.loop)
        store = SimulatedStore(self.shared, clock, self.count, Weather())
        options.setdefault("timeouts", Timeouts(lease=LEASE))
        return SimulatedNode(name, store, settings, clock, self.count, steps, **options).launch()

    def gossip(self, name: str, *, steps: int = 100, **options: Any) -> SimulatedGossip:
        self.count += 1
        clock = VirtualClock(self.loop)
        store = SimulatedStore(self.shared, clock, self.count, Weather())
        options.setdefault("timeouts", Timeouts(lease=LEASE))
        return SimulatedGossip(name, store, GOSSIP, clock, self.count, steps, **options).launch()

    def visitor(self, mailbox: Mailbox | None = None) -> Host:
        clock = VirtualClock(self.loop)
        return Host(
            "visitor", "0" * 16, mailbox or self.shared, clock, random.Random(0), Timeouts(LEASE), lambda event: None
        )

    def listed(self, prefix: str = "") -> list[str]:
        return [entry.key for entry in self.shared._entries(prefix, "")]

    async def leftovers(self, min_age: float = 0.0, mailbox: Mailbox | None = None) -> Leftovers:
        return judged(await looked_at(self.visitor(mailbox), self.loop.time()), min_age, LEASE)

    async def clean(self, min_age: float = 0.0, mailbox: Mailbox | None = None) -> dict[str, dict[str, int]]:
        found = await self.leftovers(min_age, mailbox)
        return await removed(self.visitor(mailbox), found, LEASE, self.loop.time, lambda gone: None)


def at_place(main: Callable[[Place], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` to its end on virtual time."""
    return run_virtually(lambda loop: main(Place(loop)))


async def all_ended(nodes: list[SimulatedGossip]) -> None:
    await asyncio.gather(*(node.task for node in nodes if node.task is not None))
