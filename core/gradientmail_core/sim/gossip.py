"""Simulated nodes of a gossip run: the production engine on virtual time, with a toy model that can be judged.

The toy model descends a quadratic bowl with noise, so the parameters of a sound run stay near its bottom whatever
happens, and a fault that makes the mean run away shows. A killed node stops at whatever it awaits.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.engine.gossip import GossipNode
from gradientmail_core.engine.gossip_learner import GossipLearner, Moved
from gradientmail_core.engine.run import Host
from gradientmail_core.events import Event
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.mailbox.retrying import RetryingMailbox
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.loop import VirtualClock
from gradientmail_core.sim.world import ToyModel
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout

WAIT_POLL_SECONDS = 0.05


class Bowl(ToyModel):
    """Noisy descent on ``curvature/2 * |x - bottom|^2``: ``x -= rate * (curvature*(x - bottom) + sigma*noise)``."""

    def __init__(
        self, *, rate: float = 0.05, curvature: float = 1.0, sigma: float = 0.1, bottom: float = 1.0, elements: int = 16
    ) -> None:
        super().__init__(tensors=4, elements=elements)
        self.rate, self.curvature, self.sigma, self.bottom = rate, curvature, sigma, bottom

    def train(self, noise: np.random.Generator) -> None:
        """One step of every value."""
        for value in self.values.values():
            slope = self.curvature * (value - self.bottom) + self.sigma * noise.standard_normal(value.shape, np.float32)
            value -= np.float32(self.rate) * slope.astype(np.float32)

    def flat(self) -> Flat:
        """All parameters, one after the other."""
        return np.concatenate([self.values[tensor.name].ravel() for tensor in self.schema.tensors])


@dataclass(slots=True)
class SimulatedGossip:
    """A gossip node in a simulation, alive while ``task`` runs. ``step_seconds`` may be changed while it runs."""

    name: str
    mailbox: Mailbox
    settings: FactoredGossip
    clock: VirtualClock
    seed: int
    steps: int
    step_seconds: float = 0.1
    tokens: int = 8
    min_nodes: int = 1
    timeouts: Timeouts = field(default_factory=Timeouts)
    model: ToyModel = field(default_factory=Bowl)
    close_timeout: float = 60.0
    events: list[tuple[float, Event]] = field(default_factory=list)
    on_event: Callable[[Event], None] = lambda event: None
    on_moved: Callable[[Moved], None] = lambda moved: None
    paused: bool = False
    stall_seconds: float = 0.0
    engine: GossipNode | None = None
    learner: GossipLearner | None = None
    task: asyncio.Task[None] | None = None

    def launch(self) -> "SimulatedGossip":
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
            incarnation=f"{random.Random(self.seed).getrandbits(64):016x}",
            mailbox=RetryingMailbox(self.mailbox, self.clock, random.Random(self.seed + 1), self._emit),
            clock=self.clock,
            random=random.Random(self.seed),
            timeouts=self.timeouts,
            emit=self._emit,
        )
        self.engine = engine = GossipNode(host, self.settings, min_nodes=self.min_nodes)
        try:
            learner = await self._joined(engine)
            await self._train(engine, learner)
            await self._close(engine, learner)
        except BaseException:
            await engine.stop()
            raise

    async def _joined(self, engine: GossipNode) -> GossipLearner:
        found = await engine.enter()
        layouts = self.settings.partition.layouts(self.model.schema, self.settings.fragments)
        theta = [self._read(layout) for layout in layouts] if found is None else []
        joined = await engine.join(found, self.model.schema, None, layouts, theta)
        await engine.wait_for_nodes()
        self.learner = learner = GossipLearner(
            self.model,
            engine.layouts,
            self.settings,
            joined,
            begin=engine.begin,
            exchange=engine.exchange,
            applied=self._applied,
        )
        engine.start(learner, lambda failure: None)
        learner.launch()
        return learner

    async def _train(self, engine: GossipNode, learner: GossipLearner) -> None:
        noise = np.random.default_rng(self.seed)
        while learner.state.local_step < self.steps:
            await self.clock.sleep(self.step_seconds)
            while self.paused:
                await self.clock.sleep(WAIT_POLL_SECONDS)
            self.model.train(noise)
            learner.step(self.tokens)
            if learner.blocked:
                await self._until(engine, lambda: not learner.blocked)

    async def _close(self, engine: GossipNode, learner: GossipLearner) -> None:
        learner.finish()
        engine.prepare_to_leave()
        await self._until(engine, lambda: not learner.outstanding, self.close_timeout)
        await engine.leave(self.timeouts.lease)
        learner.settle()

    async def _until(self, engine: GossipNode, done: Callable[[], bool], patience: float | None = None) -> None:
        assert self.learner is not None
        started = self.clock.now()
        self.learner.align()
        while not done() and (patience is None or self.clock.now() - started < patience):
            if engine.failure is not None:
                raise engine.failure
            await self.clock.sleep(WAIT_POLL_SECONDS)
            self.stall_seconds += WAIT_POLL_SECONDS
            self.learner.align()

    def _read(self, layout: FragmentLayout) -> Flat:
        values = np.empty(layout.size, np.float32)
        self.model.read(layout, values)
        return values

    def _applied(self, moved: Moved) -> None:
        assert self.engine is not None
        self.engine.moved(moved)
        self.on_moved(moved)

    def _emit(self, event: Event) -> None:
        self.events.append((self.clock.now(), event))
        self.on_event(event)


def _heard(life: asyncio.Task[None]) -> None:
    """Take note of how a life ended: who launched the node asks for it, or does not care."""
    if not life.cancelled():
        life.exception()
