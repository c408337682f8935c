"""Gossip nodes and their parts on virtual time: what the tests of the gossip engine share."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.algorithms.mixing import All
from gradientmail_core.engine.gossip_gathering import Surroundings
from gradientmail_core.engine.gossip_shares import GossipRun, Means, initial_mean
from gradientmail_core.engine.joining import create_run
from gradientmail_core.engine.run import Board, Host
from gradientmail_core.events import Event
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.protocol.gossip import Member, RosterRecord
from gradientmail_core.protocol.keys import LeaseKey, LeaseState
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.gossip import Bowl, SimulatedGossip
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.store import SimulatedStore, Weather
from gradientmail_core.sim.world import ToyModel

T = TypeVar("T")

EXACT = FactoredGossip(
    sync_every=20, fragments=2, mix2=All(), delta_codec="F32", mean_codec="F32", timeout=5.0, follow=False
)
TIMEOUTS = Timeouts(lease=12.0)


def incarnation(number: int) -> str:
    """The incarnation of the ``number``-th host of a place."""
    return f"{number:016x}"


@dataclass(slots=True)
class Place:
    """A shared mailbox on virtual time, and the gossip nodes around it with all their events."""

    loop: VirtualLoop
    mailbox: MemoryMailbox = field(default_factory=lambda: MemoryMailbox("run"))
    weather: Weather = field(default_factory=Weather)
    log: list[tuple[float, str, Event]] = field(default_factory=list)
    nodes: list[SimulatedGossip] = field(default_factory=list)
    stores: dict[str, SimulatedStore] = field(default_factory=dict)
    seeds: int = 0

    def host(self, node: str = "a", mailbox: Any = None) -> Host:
        """A process; every host draws from another seed."""
        self.seeds += 1
        return Host(
            node=node,
            incarnation=incarnation(self.seeds),
            mailbox=self.mailbox if mailbox is None else mailbox,
            clock=VirtualClock(self.loop),
            random=random.Random(self.seeds),
            timeouts=TIMEOUTS,
            emit=lambda event: self.log.append((self.loop.time(), node, event)),
        )

    async def surroundings(self, node: str = "a", settings: FactoredGossip = EXACT) -> Surroundings:
        """A node's view of a run that is created if there is none; its initial means are here."""
        host, model = self.host(node), ToyModel()
        layouts = settings.partition.layouts(model.schema, settings.fragments)
        theta = [np.full(layout.size, 2.0, np.float32) for layout in layouts]
        found = await create_run(host, settings, model.schema, None, layouts, theta)
        run, means = GossipRun.of(found.manifest, found.layouts, settings), Means()
        for layout in layouts:
            means.keep(initial_mean(run, layout.fragment, theta[layout.fragment]))
        return Surroundings(host, run, Board(host), means)

    def launch(self, name: str, settings: FactoredGossip = EXACT, steps: int = 100, **options: Any) -> SimulatedGossip:
        """Start a simulated node: the production engine with a toy trainer."""
        self.seeds += 1
        clock = VirtualClock(self.loop)
        store = self.stores[name] = SimulatedStore(self.mailbox, clock, self.seeds, self.weather)
        options = {"timeouts": TIMEOUTS, "model": Bowl(), **options}
        node = SimulatedGossip(name, store, settings, clock, self.seeds, steps, **options)
        node.on_event = lambda event: self.log.append((self.loop.time(), name, event))
        self.nodes.append(node)
        return node.launch()

    async def ended(self, *nodes: SimulatedGossip) -> None:
        """Until these nodes (all by default) have left; raises what any of them died of."""
        await asyncio.gather(*(node.task for node in nodes or self.nodes if node.task is not None))

    def events(self, kind: type[T], node: str | None = None) -> list[T]:
        """Everyone's (or a node's) events of one kind, in order."""
        return [event for _, who, event in self.log if isinstance(event, kind) and node in (None, who)]

    def listed(self, prefix: str = "") -> list[str]:
        """Every key in the mailbox below a prefix."""
        return [entry.key for entry in self.mailbox._entries(prefix, "")]


def virtually(main: Callable[[Place], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` to its end on virtual time, at a place of its own."""
    return run_virtually(lambda loop: main(Place(loop)))


def live(board: Board, *nodes: str, state: LeaseState = "t", beat: int = 0, tag: str = "0a" * 8) -> None:
    """Let the board see beats of these nodes."""
    board.listed([LeaseKey(node, beat, state, 0, tag) for node in nodes])


def roster(here: Surroundings, round: int, nodes: Sequence[str], **changes: Any) -> RosterRecord:
    """A roster of these nodes, which all are the incarnation that ``here`` is."""
    fields: dict[str, Any] = {
        "run": here.run.id, "round": round, "node": nodes[0], "nonce": "0f", "seed": "0e",
        "members": tuple(Member(node, here.host.incarnation) for node in nodes),
        "averagers": tuple(nodes[p % len(nodes)] for p in range(len(here.run.layouts))),
        "mean": True, "strong": False, "l2": None, "js": None,
    }  # fmt: skip
    return RosterRecord(**{**fields, **changes})
