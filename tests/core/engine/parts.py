"""Small real parts for tests of the engine: a run of a toy model, heads, records, snapshots, hosts on virtual time."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.chain import Head, genesis, succeeded
from gradientmail_core.engine.fragment import Fragment
from gradientmail_core.engine.joining import Found, create_run, load_heads
from gradientmail_core.engine.learner import Commit, Message, Snapshot
from gradientmail_core.engine.publishing import encoded_snapshot
from gradientmail_core.engine.run import Board, Host, Run
from gradientmail_core.events import Event
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.protocol.exchange import Decided, commit_round, put_section, read_round
from gradientmail_core.protocol.keys import DeltaKey, LeaseKey, LeaseState, blob_key
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.protocol.plan import plan_rows, schema_rows
from gradientmail_core.protocol.records import Estimates, Manifest, Participant, RoundRecord, Section
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.store import SimulatedStore, Weather
from gradientmail_core.sim.world import SimulatedNode, ToyModel
from gradientmail_core.tensors.model import Flat

T = TypeVar("T")

SETTINGS = DiLoCo(sync_every=20, fragments=2, delta_codec="F32")
TIMEOUTS = Timeouts(lease=12.0)
INCARNATION = "0a" * 8


@dataclass(slots=True)
class Place:
    """A shared mailbox on virtual time, the hosts and nodes around it, and all their events."""

    loop: VirtualLoop
    mailbox: MemoryMailbox = field(default_factory=lambda: MemoryMailbox("run"))
    weather: Weather = field(default_factory=Weather)
    log: list[tuple[str, Event]] = field(default_factory=list)
    nodes: list[SimulatedNode] = field(default_factory=list)
    seeds: int = 0

    def host(self, node: str = "a", mailbox: Mailbox | None = None, *, rate: float = 1.0) -> Host:
        """A process with a clock of its own; every host draws from another seed."""
        self.seeds += 1
        return Host(
            node=node,
            incarnation=f"{self.seeds:016x}",
            mailbox=self.mailbox if mailbox is None else mailbox,
            clock=VirtualClock(self.loop, offset=1000.0 * self.seeds, rate=rate),
            random=random.Random(self.seeds),
            timeouts=TIMEOUTS,
            emit=lambda event: self.log.append((node, event)),
        )

    def launch(self, name: str, *, settings: DiLoCo = SETTINGS, steps: int = 100, **options: Any) -> SimulatedNode:
        """Start a simulated node: the production engine with a toy trainer."""
        self.seeds += 1
        clock = VirtualClock(self.loop)
        store = SimulatedStore(self.mailbox, clock, self.seeds, self.weather)
        node = SimulatedNode(name, store, settings, clock, self.seeds, steps, timeouts=TIMEOUTS, **options)
        node.on_event = lambda event: self.log.append((name, event))
        self.nodes.append(node)
        return node.launch()

    def events(self, kind: type[T]) -> list[T]:
        """Everyone's events of one kind, in order."""
        return [event for _, event in self.log if isinstance(event, kind)]

    def listed(self, prefix: str = "") -> list[str]:
        """Every key in the mailbox below a prefix."""
        return [entry.key for entry in self.mailbox._entries(prefix, "")]


class Bench:
    """Fragment 0 of a run as one node lives it; the other nodes are what the test writes into the mailbox."""

    def __init__(self, place: Place, host: Host, run: Run, commit: Commit) -> None:
        self.place, self.host, self.run, self.loaded = place, host, run, commit
        self.messages: list[Message] = []
        self.wishes: list[bool] = []
        self.board = Board(host)
        self.chain = Fragment(
            host, run, self.board, commit, self.messages.append, lambda _, early: self.wishes.append(early)
        )
        self.board.open_rounds.update({fragment: run.fragments + fragment for fragment in range(run.fragments)})
        self.others = {name: replace(host, node=name, incarnation=INCARNATION) for name in "abcdef"}

    @classmethod
    async def of(cls, place: Place, node: str = "a", settings: DiLoCo = SETTINGS, mailbox: Any = None) -> "Bench":
        """Node ``node`` in a run that node ``a`` created, so that ``a`` is its closer."""
        run = await created(place.host("a"), settings)
        host = place.host(node, mailbox)
        return cls(place, host, run, (await load_heads(host, run, {}))[0])

    def live(self, *nodes: str, state: LeaseState = "t", beat: int = 0) -> None:
        """Let the board see beats of these nodes."""
        self.board.listed([LeaseKey(node, beat, state, 0, INCARNATION) for node in nodes])

    async def snapshot(self, node: str, delta: Any = 0.5, **changes: Any) -> None:
        """Put another node's snapshot for the open round into the mailbox."""
        body = snapshot_body(self.run, self.chain.head, self.others[node], delta, **changes)
        await self.place.mailbox.put(DeltaKey(self.chain.round, node).path, body)

    def publish(self, delta: Any = 0.5, **changes: Any) -> str:
        """Let this node publish; the snapshot's digest."""
        snapshot = taken(self.run, self.chain.head, delta, **changes)
        chain = self.chain
        own = encoded_snapshot(self.host, self.run, snapshot, chain.round, chain.layout, chain.feedback)
        chain.publishing(own)
        return own.digest

    async def commit(self, **changes: Any) -> Head:
        """Commit the open round in another node's name; the head it makes."""
        host = self.others[changes.pop("node", "b")]
        return await committed(host, self.run, self.chain.head, changes.pop("fill", 7.0), **changes)

    async def record(self) -> RoundRecord | None:
        """The record of the open round, if there is one."""
        state = await read_round(self.place.mailbox, self.run.id, self.chain.round)
        return state.record if isinstance(state, Decided) else None

    async def advanced(self, versions: int = 1, within: float = 1000.0) -> Head:
        """Run the chain's task until its head has moved on by so many versions."""
        wanted = self.chain.head.version + versions
        task = asyncio.ensure_future(self.chain.run())
        deadline = self.place.loop.time() + within
        while len([one for one in self.messages if isinstance(one, Commit)]) < wanted and not task.done():
            assert self.place.loop.time() < deadline, f"version {self.chain.head.version} after {within} s"
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            await task
        return self.chain.head

    async def kept(self, seconds: float) -> None:
        """Run the chain's task for so long."""
        task = asyncio.ensure_future(self.chain.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def virtually(main: Callable[[Place], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` to its end on virtual time, at a place of its own."""
    return run_virtually(lambda loop: main(Place(loop)))


def run_of(settings: DiLoCo = SETTINGS, model: ToyModel | None = None) -> Run:
    """A run that no mailbox holds."""
    model = model or ToyModel()
    layouts = settings.partition.layouts(model.schema, settings.fragments)
    manifest = Manifest(
        run="5a" * 16,
        node="a",
        nonce="0f",
        schema=schema_rows(model.schema),
        plan=plan_rows(layouts),
        algorithm=settings.shared_settings(),
        store="atomic",
        closers=("a",) * len(layouts),
        frozen=None,
        theta=tuple(Section("theta", blob_key(n, "a", "0" * 64), "0" * 64, "F32") for n in range(len(layouts))),
    )
    return Run(manifest, "1" * 64, layouts, settings)


async def created(host: Host, settings: DiLoCo = SETTINGS, model: ToyModel | None = None) -> Run:
    """A run in the host's mailbox, made by the host."""
    model = model or ToyModel()
    layouts = settings.partition.layouts(model.schema, settings.fragments)
    theta = []
    for layout in layouts:
        theta.append(np.empty(layout.size, np.float32))
        model.read(layout, theta[-1])
    found: Found = await create_run(host, settings, model.schema, None, layouts, theta)
    return Run(found.manifest, found.digest, found.layouts, settings)


def first_head(run: Run, fragment: int = 0, now: float = 0.0, **changes: Any) -> Head:
    """Version 0 of a fragment."""
    return replace(genesis(run.manifest, run.digest, fragment, run.settings.sync_every, now), **changes)


def record_after(head: Head, run: Run, *, nodes: Sequence[str] = ("a",), **changes: Any) -> RoundRecord:
    """A record that continues a chain; ``nodes`` took part."""
    sections = (Section("theta", blob_key(head.next_round(run.fragments), "a", "2" * 64), "2" * 64, "F32"),)
    share = 1.0 / max(len(nodes), 1)
    record = RoundRecord(
        run=run.id,
        round=head.next_round(run.fragments),
        node="a",
        nonce="0f",
        prev=head.digest,
        step=head.due,
        next_step=head.due + run.settings.sync_every,
        newest_step=head.due,
        closer=head.closer,
        sections=sections,
        participants=tuple(Participant(node, INCARNATION, "3" * 64, 20, 160, share) for node in nodes),
        refusals=(),
        estimates=Estimates(),
        cosine=None,
        merged_tokens=head.merged_tokens + 160 * len(nodes),
    )
    return replace(record, **changes)


async def committed(host: Host, run: Run, head: Head, fill: float, **changes: Any) -> Head:
    """Commit the round after ``head`` with every parameter at ``fill``; the new head."""
    round, layout = head.next_round(run.fragments), run.layouts[head.fragment]
    values = np.full(layout.size, fill, np.float32)
    section = await put_section(host.mailbox, host.clock, "theta", round, host.node, layout, values)
    roll = changes.pop("roll", None)
    sections = (section,) if roll is None else (section, roll)
    record = record_after(head, run, **{"sections": sections, "node": host.node, **changes})
    decided = await commit_round(host.mailbox, host.clock, record)
    return succeeded(head, decided, run.fragments, host.clock.now())


def taken(run: Run, head: Head, delta: Flat | float = 0.5, **changes: Any) -> Snapshot:
    """A snapshot for the round after ``head`` whose delta is ``delta``."""
    layout = run.layouts[head.fragment]
    base = np.zeros(layout.size, np.float32)
    fields: dict[str, Any] = {
        "fragment": head.fragment, "version": head.version, "record": head.digest, "base": base,
        "values": np.subtract(base, np.broadcast_to(np.float32(delta), base.shape)), "steps": 20, "tokens": 160,
        "local_step": head.due, "step_seconds": 0.1, "early": False,
    }  # fmt: skip
    return Snapshot(**{**fields, **changes})


def snapshot_body(run: Run, head: Head, host: Host, delta: Flat | float = 0.5, **changes: Any) -> bytes:
    """A snapshot of ``host`` for the round after ``head``, as the mailbox holds it."""
    snapshot, layout = taken(run, head, delta, **changes), run.layouts[head.fragment]
    return bytes(encoded_snapshot(host, run, snapshot, head.next_round(run.fragments), layout).body)
