"""Simulated nodes: the engine itself, with a toy model whose steps take virtual time.

Each node runs the production engine over a mailbox and a virtual clock. Its trainer moves a small parameter
vector a little at every step, in a direction of its own, so merges are really computed and every byte of every
commit depends on who took part. Killing a node cancels all its tasks at whatever they await, without a farewell.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.aligning import Policy
from gradientmail_core.engine.learner import Commit, Learner, Snapshot
from gradientmail_core.engine.node import Node
from gradientmail_core.engine.roles import Role
from gradientmail_core.engine.run import Host
from gradientmail_core.events import Event
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.mailbox.retrying import RetryingMailbox, RetryPolicy
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.loop import VirtualClock
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Schema, TensorSpec

WAIT_POLL_SECONDS = 0.05


class ToyModel:
    """A model of a few vectors, enough to give every fragment something to merge."""

    def __init__(self, tensors: int = 8, elements: int = 16, fill: float = 0.0) -> None:
        self.schema = Schema.of(TensorSpec(f"block.{index}.weight", (elements,), "vector") for index in range(tensors))
        self.frozen_fingerprint: str | None = None
        self._flat = np.full(tensors * elements, fill, np.float32)
        rows = self._flat.reshape(tensors, elements)
        self.values = {tensor.name: row for tensor, row in zip(self.schema.tensors, rows, strict=True)}
        self.resets = 0

    def read(self, layout: FragmentLayout, out: Flat) -> None:
        """Copy a fragment out."""
        for piece in layout.pieces:
            rows = slice(None) if piece.rows is None else slice(*piece.rows)
            out[piece.offset : piece.offset + piece.elements] = self.values[piece.name][rows].ravel()

    def write(self, layout: FragmentLayout, values: Flat) -> None:
        """Copy a fragment in."""
        for piece in layout.pieces:
            rows = slice(None) if piece.rows is None else slice(*piece.rows)
            self.values[piece.name][rows] = values[piece.offset : piece.offset + piece.elements].reshape(piece.shape)

    def poison(self, value: float) -> None:
        """Set every value, as a trainer does that has gone wrong."""
        self._flat[:] = value

    def reset_optimizer(self) -> None:
        """Count the call."""
        self.resets += 1

    def train(self, noise: np.random.Generator) -> None:
        """One step: every value drifts by a thousandth, with noise of the same size."""
        self._flat -= 1e-3 + 1e-3 * noise.standard_normal(self._flat.size, np.float32)


@dataclass(slots=True)
class SimulatedNode:
    """A node in a simulation, alive while ``task`` runs. ``step_seconds`` may be changed while it runs."""

    name: str
    mailbox: Mailbox
    settings: DiLoCo
    clock: VirtualClock
    seed: int
    steps: int
    step_seconds: float = 0.1
    tokens: int = 8
    min_nodes: int = 1
    role: Role = "both"
    syncer: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    model: ToyModel = field(default_factory=ToyModel)
    events: list[tuple[float, Event]] = field(default_factory=list)
    on_event: Callable[[Event], None] = lambda event: None
    on_commit: Callable[[Commit], None] = lambda commit: None
    on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    paused: bool = False
    keeps_events: bool = True
    stall_seconds: float = 0.0
    trained_seconds: float = 0.0
    began_at: float | None = None
    engine: Node | None = None
    learner: Learner | None = None
    task: asyncio.Task[None] | None = None

    @property
    def incarnation(self) -> str:
        """Drawn anew for each life, from its seed."""
        return f"{random.Random(self.seed).getrandbits(64):016x}"

    def launch(self) -> "SimulatedNode":
        """Start the node's process."""
        self.task = asyncio.ensure_future(self.life())
        self.task.add_done_callback(_heard)
        return self

    async def kill(self) -> None:
        """End the process as SIGKILL does: no farewell, nothing more written."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def life(self) -> None:
        """Join, train ``steps`` steps, close; what a session does, on virtual time."""
        host = Host(
            node=self.name,
            incarnation=self.incarnation,
            mailbox=RetryingMailbox(self.mailbox, self.clock, random.Random(self.seed + 1), self._emit, self.policy),
            clock=self.clock,
            random=random.Random(self.seed),
            timeouts=self.timeouts,
            emit=self._emit,
        )
        self.engine = engine = Node(host, self.settings, min_nodes=self.min_nodes, role=self.role, syncer=self.syncer)
        try:
            await self._train(engine, await self._joined(engine))
        except BaseException:
            await engine.stop()
            raise

    async def _joined(self, engine: Node) -> Learner:
        found = await engine.enter()
        layouts = self.settings.partition.layouts(self.model.schema, self.settings.fragments)
        theta = [self._read(layout) for layout in layouts] if found is None else []
        commits = await engine.join(found, self.model.schema, None, layouts, theta)
        await engine.wait_for_nodes()
        self.learner = Learner(
            self.model,
            engine.layouts,
            commits,
            in_flight=self.settings.in_flight,
            overlap_steps=self.settings.overlap_steps,
            policy=Policy.of(self.settings),
            publish=self._published,
            applied=self._applied,
            booked=self._emit,
            now=self.clock.now,
            flush=self.settings.flush_on_close,
        )
        engine.start(self.learner, commits, lambda failure: None)
        return self.learner

    async def _train(self, engine: Node, learner: Learner) -> None:
        noise = np.random.default_rng(self.seed)
        self.began_at = self.clock.now()
        while learner.state.local_step < self.steps:
            await self._work(self.step_seconds)
            while self.paused:
                await self.clock.sleep(WAIT_POLL_SECONDS)
            self.model.train(noise)
            learner.step(self.tokens)
            if engine.serving:
                learner.hand_in()
                await self._until(engine, lambda: not engine.serving)
                learner.resume()
            if learner.blocked:
                await self._until(engine, lambda: not learner.blocked)
                learner.resume()
        learner.finish()
        engine.prepare_to_leave()
        await self._until(engine, lambda: not learner.outstanding)
        await engine.leave(self.timeouts.lease)
        learner.settle()

    async def _work(self, seconds: float) -> None:
        """Train; what is cut short by a crash counts as far as it came."""
        started = self.clock.now()
        try:
            await self.clock.sleep(seconds)
        finally:
            self.trained_seconds += min(self.clock.now() - started, seconds)

    async def _until(self, engine: Node, done: Callable[[], bool]) -> None:
        assert self.learner is not None
        self.learner.align()
        while not done():
            if engine.failure is not None:
                raise engine.failure
            await self.clock.sleep(WAIT_POLL_SECONDS)
            self.stall_seconds += WAIT_POLL_SECONDS
            self.learner.align()

    def _read(self, layout: FragmentLayout) -> Flat:
        values = np.empty(layout.size, np.float32)
        self.model.read(layout, values)
        return values

    def _published(self, snapshot: Snapshot) -> None:
        assert self.engine is not None
        self.on_snapshot(snapshot)
        self.engine.publish(snapshot)

    def _applied(self, commit: Commit) -> None:
        self.on_commit(commit)

    def _emit(self, event: Event) -> None:
        if self.keeps_events:
            self.events.append((self.clock.now(), event))
        self.on_event(event)


def _heard(life: asyncio.Task[None]) -> None:
    """Take note of how a life ended: who launched the node asks for it, or does not care."""
    if not life.cancelled():
        life.exception()


def ended(nodes: Sequence[SimulatedNode]) -> "asyncio.Future[list[None]]":
    """All the nodes' lives; raises what any of them died of."""
    return asyncio.gather(*(node.task for node in nodes if node.task is not None))
