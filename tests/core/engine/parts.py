"""Small real parts for tests of the engine: a run of a toy model, heads, records, snapshots, hosts on virtual time."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.chain import Head, genesis, succeeded
from gradientmail_core.engine.joining import Found, create_run
from gradientmail_core.engine.learner import Snapshot
from gradientmail_core.engine.publishing import encoded_snapshot
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.events import Event
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.protocol.exchange import commit_round, put_section
from gradientmail_core.protocol.keys import blob_key
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.protocol.plan import plan_rows, schema_rows
from gradientmail_core.protocol.records import Estimates, Manifest, Participant, RoundRecord, Section
from gradientmail_core.sim.loop import VirtualClock, run_virtually
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

    loop: asyncio.AbstractEventLoop
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
    record = record_after(head, run, **{"sections": (section,), "node": host.node, **changes})
    decided = await commit_round(host.mailbox, host.clock, record)
    return succeeded(head, decided, run.fragments, host.clock.now())


def snapshot_body(run: Run, head: Head, host: Host, delta: Flat | float = 0.5, **changes: Any) -> bytes:
    """A snapshot of ``host`` for the round after ``head``, as the mailbox holds it."""
    layout = run.layouts[head.fragment]
    base = np.zeros(layout.size, np.float32)
    fields: dict[str, Any] = {
        "fragment": head.fragment, "version": head.version, "record": head.digest, "base": base,
        "values": np.subtract(base, np.broadcast_to(np.float32(delta), base.shape)), "steps": 20, "tokens": 160,
        "local_step": head.due, "step_seconds": 0.1, "early": False,
    }  # fmt: skip
    snapshot = Snapshot(**{**fields, **changes})
    return bytes(encoded_snapshot(host, run, snapshot, head.next_round(run.fragments), layout).body)
