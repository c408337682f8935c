"""Where simulated nodes live and faults strike: a shared store, a line for each node, all that can go wrong."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import assert_never

from gradientmail_core.protocol.keys import DeltaKey, HeadKey, creation_key, parse_live, tape_key
from gradientmail_core.sim.loop import VirtualLoop
from gradientmail_core.sim.scenario import (
    Cut,
    Fault,
    Freeze,
    Hang,
    Junk,
    Kill,
    Outage,
    Partition,
    Poison,
    Slow,
)
from gradientmail_core.sim.store import SharedStore, SimulatedStore, Traffic
from gradientmail_core.sim.world import SimulatedNode


class Stage(ABC):
    """The nodes of one run by number, and their lines to the store. ``lives`` counts processes, now and before."""

    def __init__(self, loop: VirtualLoop, shared: SharedStore, fragments: int) -> None:
        self.loop = loop
        self.shared = shared
        self.stores: dict[int, SimulatedStore] = {}
        self.nodes: dict[int, SimulatedNode] = {}
        self.lives = 0
        self.traffics: list[Traffic] = []
        self._fragments = fragments
        self._running: set[asyncio.Task[None]] = set()

    @abstractmethod
    def launch(self, number: int) -> None:
        """Start a process of node ``number``, the first or after another died."""

    def connected(self, number: int, store: SimulatedStore) -> None:
        """Node ``number``'s new process has this line to the store, which is down if its last one was."""
        store.up = number not in self.stores or self.stores[number].up
        self.stores[number] = store
        self.traffics.append(store.traffic)

    @property
    def traffic(self) -> Traffic:
        """What all lives together have asked of the store so far."""
        return sum(self.traffics, Traffic())

    def living(self) -> list[SimulatedNode]:
        """Nodes whose process runs."""
        return [node for node in self.nodes.values() if node.task is not None and not node.task.done()]

    async def strike(self, fault: Fault) -> None:
        """Wait for a fault's time, let it happen, and end it."""
        await asyncio.sleep(fault.at)
        match fault:
            case Outage(seconds=seconds):
                await self._outage(list(self.stores), seconds)
            case Partition(node=node, seconds=seconds):
                await self._outage([node] if node in self.stores else [], seconds)
            case Junk():
                await self._junk(fault)
            case Kill(node=node, down=down):
                await self._kill(node, down)
            case Cut(node=node, down=down):
                if node in self.stores:
                    self.stores[node].cut = lambda: self._after(self._kill(node, down))
            case Freeze(node=node, seconds=seconds):
                await self._freeze(node, seconds)
            case Hang(node=node, seconds=seconds):
                await self._hang(node, seconds)
            case Slow(node=node, seconds=seconds, times=times):
                await self._slow(node, seconds, times)
            case Poison(node=node, value=value):
                if node in self.nodes:
                    self.nodes[node].model.poison(value)
            case _:
                assert_never(fault)

    async def _outage(self, numbers: list[int], seconds: float) -> None:
        for number in numbers:
            self.stores[number].up = False
        await asyncio.sleep(seconds)
        for number in numbers:
            self.stores[number].up = True

    async def _kill(self, number: int, down: float | None) -> None:
        if number not in self.nodes:
            return
        await self.nodes[number].kill()
        if down is not None:
            await asyncio.sleep(down)
            task = self.nodes[number].task
            if task is None or task.done():
                self.launch(number)

    async def _freeze(self, number: int, seconds: float) -> None:
        if number in self.nodes:
            clock = self.nodes[number].clock
            clock.freeze()
            await asyncio.sleep(seconds)
            clock.thaw()

    async def _hang(self, number: int, seconds: float) -> None:
        if number in self.nodes:
            node = self.nodes[number]
            node.paused = True
            await asyncio.sleep(seconds)
            node.paused = False

    def _after(self, work: Coroutine[object, object, None]) -> None:
        self._running.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._running.discard)

    async def _slow(self, number: int, seconds: float, times: float) -> None:
        if number in self.nodes:
            node = self.nodes[number]
            node.step_seconds *= times
            await asyncio.sleep(seconds)
            node.step_seconds /= times

    async def _junk(self, junk: Junk) -> None:
        if junk.kind == "replay":
            return await self._replay()
        keys = {
            "delta": DeltaKey(junk.round, "node-0").path,
            "tape": tape_key(junk.round, 0),
            "head": HeadKey(0, junk.round).path,
            "lease": "live/leases/node-0/0000000001-t0-nothex",
            "stray": f"live/deltas/readme-{junk.round}.txt",
            "creation": creation_key(junk.round % 3),
        }
        await self.shared.create(keys[junk.kind], b"not a record")

    async def _replay(self) -> None:
        """Let the newest snapshot appear under its node's key of the next round, too."""
        keys = [parse_live(entry.key) async for entry in self.shared.list("live/deltas/")]
        deltas = [key for key in keys if isinstance(key, DeltaKey)]
        if deltas:
            newest = max(deltas, key=lambda key: (key.round, key.node))
            body = await self.shared.get(newest.path)
            again = DeltaKey(newest.round + self._fragments, newest.node)
            await self.shared.put(again.path, body or b"")
