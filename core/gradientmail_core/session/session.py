"""One node's part in a run, for a training loop: a bridge between the training thread and the engine's.

    with Session(model, mailbox="s3://bucket/run", algorithm=DiLoCo(sync_every=100)) as session:
        for batch in data:
            train(batch)
            session.step(len(batch))

The engine runs on one background thread with an event loop of its own, so a session works in a notebook, which
already runs a loop. The model is touched on the training thread only. ``step`` does no I/O: it counts, writes
commits that have arrived, and copies a fragment out when one is due; it waits only where ``overlap_steps`` says
that training may not run further ahead.

Leaving the context waits for the rounds in flight, gives up when the run stalls, and sets the model to the
newest commit. An exception in the loop aborts: the lease is released and nothing more is published.
"""

import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from gradientmail_core.adapters import framework_of, resolve
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.clock import SystemClock
from gradientmail_core.engine.aligning import Policy
from gradientmail_core.engine.gossip import GossipNode
from gradientmail_core.engine.gossip_learner import GossipLearner
from gradientmail_core.engine.learner import POISONED_MOST, Commit, Learner, Snapshot
from gradientmail_core.engine.node import Node
from gradientmail_core.engine.resuming import Continued, Saved, continued, parse_saved, saved_json
from gradientmail_core.engine.roles import trainers_role
from gradientmail_core.engine.run import Host
from gradientmail_core.errors import (
    ConfigurationError,
    GradientMailError,
    SessionClosed,
    SessionFailed,
)
from gradientmail_core.events import Callback, Event, RunResumed, RunWaited, emitter, log_event
from gradientmail_core.mailbox import Mailbox, MeteredMailbox
from gradientmail_core.mailbox.retrying import RetryingMailbox
from gradientmail_core.protocol.keys import checked_node
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.session.aligning import opened
from gradientmail_core.session.arguments import check_numbers, default_node, length_of, whole_number
from gradientmail_core.session.background import Loop, at_exit
from gradientmail_core.session.gossiping import Bridge, gossip_state, is_gossip_state
from gradientmail_core.session.handing import Handoff, Keeper
from gradientmail_core.session.leaving import left
from gradientmail_core.session.readings import Algorithm, Readings
from gradientmail_core.session.recipes import Recipes
from gradientmail_core.session.termination import SESSIONS
from gradientmail_core.tensors.model import Flat, set_aside
from gradientmail_core.tensors.schema import FragmentLayout

T = TypeVar("T")

logger = logging.getLogger("gradientmail")

WAIT_SLICE_SECONDS = 0.5
WAIT_REPORT_SECONDS = 10.0


class Session(Readings):
    """A node of a run, used from the training thread.

    ``model`` is a torch or MLX module, or anything that satisfies :class:`gradientmail_core.tensors.model.Model`.
    ``mailbox`` is a URL or a mailbox. ``node`` names this node (default: host name and random hex); ``min_nodes``
    holds the start of a run back until so many are there. ``lease_timeout`` and ``progress_timeout`` are in seconds.
    ``role`` is "both", "learner" for a node that never closes rounds (``gradientmail syncer`` does nothing else), or
    "either" for one that holds its training, in ``step()``, and closes for all while the run has elected it its syncer.
    ``syncer``, the same on every node, names the one that creates the run and closes all its rounds, for stores without
    a conditional create. With ``ranks`` the node holds one of so many slices of the data, :attr:`rank`, and waits at
    the start until one is free. With ``handoff``, such as a ``TorchHandoff``, the node's whole state is written to the
    mailbox every ``handoff_every`` steps, and a process that starts under the same ``node`` goes on from there.
    ``callbacks`` receive every event; the default logs them. With ``sigterm`` a SIGTERM leaves the run as Ctrl-C does,
    unless the program has a handler of its own.
    """

    def __init__(
        self,
        model: object,
        *,
        mailbox: str | os.PathLike[str] | Mailbox,
        algorithm: Algorithm,
        node: str | None = None,
        min_nodes: int = 1,
        syncer: str | None = None,
        lease_timeout: float = 120.0,
        progress_timeout: float = 300.0,
        close_timeout: float | None = None,
        role: str = "both",
        ranks: int | None = None,
        handoff: Handoff | None = None,
        handoff_every: int = 1000,
        callbacks: Sequence[Callback] = (log_event,),
        sigterm: bool = True,
    ) -> None:
        check_numbers(min_nodes, lease_timeout, progress_timeout)
        if not isinstance(algorithm, DiLoCo | FactoredGossip):
            raise ConfigurationError(f"{algorithm!r} is no algorithm.", "Give DiLoCo(sync_every=..., fragments=...).")
        name = checked_node(node) if node is not None else default_node()
        super().__init__(name, resolve(model), algorithm, MeteredMailbox(opened(mailbox)), ranks)
        self._min_nodes = min_nodes
        self._syncer = checked_node(syncer) if syncer is not None else None
        self._close_timeout = lease_timeout + 30.0 if close_timeout is None else close_timeout
        self._clock = SystemClock()
        entropy = random.Random(secrets.randbits(64))
        emit = self._emitter((self._rounds.heard, *callbacks))
        self._host = Host(
            node=self.node,
            incarnation=secrets.token_hex(8),
            mailbox=RetryingMailbox(self._meter, self._clock, entropy, emit),
            clock=self._clock,
            random=entropy,
            timeouts=Timeouts(lease_timeout, progress_timeout),
            emit=emit,
            framework=framework_of(self._model),
        )
        self._loop: Loop | None = None
        self._news = threading.Event()
        self._saved: Saved | None = None
        self._role = trainers_role(role)
        self._keeper = Keeper(handoff, handoff_every) if handoff is not None else None
        if handoff is not None and (node is None or isinstance(algorithm, FactoredGossip)):
            raise ConfigurationError(
                "A hand-off needs a node's name to be found by, and a run that resumes.",
                "Give node=..., the same at each start, and DiLoCo(...).",
            )
        self._pauses = 0
        self._sigterm = sigterm
        self._ends_on_sigterm = False

    # -- life ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort(f"{type(error).__name__}: {error}")

    def join(self) -> None:
        """Create or join the run and load its newest parameters into the model.

        Raises :class:`SchemaMismatch`, :class:`RunMismatch`, :class:`ConfigurationError` or a mailbox error.
        """
        if self._ended or self._learner is not None:
            raise SessionClosed("This session was already used.", "Make a new Session.")
        layouts = self._algorithm.partition.layouts(self._model.schema, self._algorithm.fragments)
        self._loop = Loop()
        at_exit(self._at_exit)
        try:
            self._ends_on_sigterm = self._sigterm and SESSIONS.begin()
            if isinstance(self._algorithm, FactoredGossip):
                if self._role != "both":
                    raise ConfigurationError(
                        f"role={self._role!r} in a gossip run.", "Leave it out: nobody closes rounds."
                    )
                if self._syncer is not None:
                    raise ConfigurationError("A gossip run has no syncer.", "Leave syncer out, or use DiLoCo.")
                self._engine = gossip = GossipNode(self._host, self._algorithm, min_nodes=self._min_nodes)
                self._enter_gossip(self._loop, gossip, layouts)
            else:
                self._engine = node = Node(
                    self._host, self._algorithm, min_nodes=self._min_nodes, role=self._role, syncer=self._syncer
                )
                self._enter(self._loop, node, layouts, self._algorithm)
        except BaseException as error:
            self.abort(f"{type(error).__name__} while joining")
            raise

    def _initial(self, layouts: Sequence[FragmentLayout]) -> list[Flat]:
        """The model's own parameters, for a run that this node may create."""
        theta = []
        for layout in layouts:
            theta.append(np.empty(layout.size, np.float32))
            self._model.read(layout, theta[-1])
        return theta

    def _enter_gossip(self, loop: Loop, engine: GossipNode, layouts: Sequence[FragmentLayout]) -> None:
        found = self._awaited(loop, engine.enter())
        theta = self._initial(layouts) if found is None else []
        schema, frozen = self._model.schema, self._model.frozen_fingerprint
        joined = self._awaited(loop, engine.join(found, schema, frozen, layouts, theta))
        self._awaited(loop, engine.wait_for_nodes())
        bridge = Bridge(loop, engine)
        self._learner = learner = bridge.learner(self._model, joined, self._news.set)
        loop.run(bridge.started(learner, self._failed))
        learner.launch()

    def _enter(self, loop: Loop, engine: Node, layouts: Sequence[FragmentLayout], algorithm: DiLoCo) -> None:
        found = self._awaited(loop, engine.enter())
        theta = self._initial(layouts) if found is None else []
        schema, frozen = self._model.schema, self._model.frozen_fingerprint
        commits = self._awaited(loop, engine.join(found, schema, frozen, layouts, theta))
        self._awaited(loop, engine.wait_for_nodes())
        if self._keeper is not None:
            self._keeper.begin(self._host, engine.run_id)
            self._saved = self._keeper.restored(loop, self._host) if self._saved is None else self._saved
        on = self._continued(loop, engine, commits)
        self._learner = Learner(
            self._model,
            engine.layouts,
            commits,
            in_flight=algorithm.in_flight,
            overlap_steps=algorithm.overlap_steps,
            policy=Policy.of(algorithm),
            publish=self._publish,
            applied=self._applied,
            now=time.monotonic,
            delivered=self._news.set,
            booked=self._host.emit,
            resumed=on.state,
            kept=on.kept,
            memories=on.memories,
            flush=algorithm.flush_on_close,
        )
        loop.run(_started(engine, self._learner, commits, self._failed, self._news.set, on))
        self._recipes = Recipes(self._host, engine, loop, self._held)
        if self._ranks is not None:
            self._recipes.take_rank(self._ranks)

    def _continued(self, loop: Loop, engine: Node, commits: Sequence[Commit]) -> Continued:
        """The loaded checkpoint on top of the run's newest commits."""
        saved, heads = self._saved, [commit.head for commit in commits]
        if saved is None:
            return Continued()
        if saved.run != engine.run_id or len(saved.state.tracks) != len(heads):
            self._host.emit(RunWaited("the loaded state is of another run: starting from the run's newest commits"))
            return Continued()
        on = continued(saved, heads, self._awaited(loop, engine.counted(saved.state, heads)))
        step = on.state.global_step if on.state is not None else 0
        self._host.emit(RunResumed(engine.run_id, self.node, step, len(on.kept), len(heads)))
        return on

    def _awaited(self, loop: Loop, work: Coroutine[object, None, T]) -> T:
        self._waiting = True
        try:
            return loop.run(work)
        finally:
            self._waiting = False

    def close(self) -> None:
        """Wait for the rounds in flight, set the model to the newest commit, and leave. Safe to call twice.

        Gives up waiting when nothing arrives for ``close_timeout`` seconds.
        """
        if self._ended or self._loop is None or self._engine is None or self._learner is None:
            self._ended = True
            return
        self._raise_failure()
        patience = min(self._close_timeout, self._host.timeouts.lease)
        try:
            self._learner.finish()
            self._loop.call(self._engine.prepare_to_leave)
            self._wait_until(lambda learner: not learner.outstanding, self._close_timeout)
            if self._recipes is not None:
                self._recipes.release(patience)
            self._awaited(self._loop, left(self._host, self._engine, patience))
            self._learner.settle()
        except BaseException as error:
            self.abort(f"{type(error).__name__} while closing")
            raise
        self._end()

    def abort(self, reason: str = "aborted") -> None:
        """Leave at once: publish nothing more, release the lease. The model keeps its local parameters."""
        if self._ended or self._loop is None or self._engine is None:
            self._ended = True
            return
        self._ended = True
        if self._recipes is not None:
            self._recipes.stop()
        try:
            self._loop.run(self._engine.abort(reason))
        finally:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._recipes = None
        ends, self._ends_on_sigterm = self._ends_on_sigterm, False
        if ends:
            SESSIONS.end()
        if self._loop is not None:
            try:
                self._loop.run(self._host.mailbox.close())
            finally:
                self._loop.stop()
        self._clock.close()

    def _at_exit(self) -> None:
        """The interpreter ends and nobody closed the session: release the lease, so that no round waits for it."""
        if not self._ended:
            self.abort("the interpreter ended before close()")

    # -- training ------------------------------------------------------------------------------------------

    def step(self, samples: int = 1) -> bool:
        """Count one optimizer step on ``samples`` samples (or tokens; the same unit on every node).

        True if committed parameters were written into the model. Raises :class:`SessionFailed` when the store
        refused for good, and :class:`RankLost` after the step, once, when this node's rank went back to another.
        """
        learner = self._learner
        if samples.__class__ is not int or samples < 0:
            samples = whole_number(samples)
        if learner is None or self._ended:
            raise SessionClosed("step() outside a joined session.", "Use it between join() and close().")
        if self._pauses:
            raise SessionClosed("step() while the session is paused.", "Train outside paused() and global_model().")
        changed = learner.step(samples)
        if self._engine is not None and self._engine.failure is not None:
            self._raise_failure()
        if self._engine is not None and self._engine.serving:
            changed = self._serve() or changed
        if learner.blocked:
            changed = self._wait_until(lambda held: not held.blocked, None) or changed
            learner.resume()
        if learner.poisoned:
            self._leave_poisoned()
        if self._keeper is not None and self._loop is not None:
            self._keeper.stepped(self._loop, self._host, learner.state.local_step, self.state_dict)
        if self._recipes is not None:
            self._recipes.check_rank()
        return changed

    def run(self, step: Callable[[T], int | None], data: Iterable[T]) -> None:
        """Train on ``data``: ``step(batch)`` makes one optimizer step, after which the session counts it.

        ``step`` returns how many samples it trained on; for None the batch's length counts, or 1 if it has none.
        Joins and closes by itself unless the session was joined before.
        """
        if self._learner is None:
            with self:
                return self.run(step, data)
        for batch in data:
            samples = step(batch)
            self.step(length_of(batch) if samples is None else samples)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this the node does not train: no round waits for it and no time-out counts, its closing goes on."""
        learner, engine, loop = self._joined()
        self._pauses += 1
        if self._pauses == 1:
            loop.call(engine.pause)
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0 and not self._ended:
                learner.resume()
                loop.call(engine.resume)

    @contextmanager
    def global_model(self) -> Iterator[int | None]:
        """Within this the model holds the newest committed parameters; the local ones are back, bit for bit, after it.

        Gives the run's step of those parameters; None, with the local ones left in place, while nothing was merged
        yet. The node is :meth:`paused` meanwhile. After :meth:`close` the model holds the newest commit anyway.
        """
        if self._ended and self._learner is not None:
            yield self.global_step
            return
        learner, engine, _ = self._joined()
        with self.paused():
            if not any(self.versions) and not learner.committed():
                logger.warning("Nothing was merged yet: the model keeps this node's own parameters.")
                yield None
                return
            write_back = set_aside(self._model, engine.layouts)
            try:
                for layout, values in zip(engine.layouts, learner.anchors(), strict=True):
                    self._model.write(layout, values)
                yield self.global_step
            finally:
                write_back()

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self.paused():
            self._waiting = True
            try:
                yield
            finally:
                self._waiting = False

    def _joined(self) -> tuple[Learner | GossipLearner, Node | GossipNode, Loop]:
        if self._learner is None or self._engine is None or self._loop is None or self._ended:
            raise SessionClosed("The session is not joined.", "Use this between join() and close().")
        return self._learner, self._engine, self._loop

    # -- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint of the trainer lacks to go on exactly, as plain JSON; take it between two steps.

        It is small, but for error feedback, whose residuals are as large as the trained parameters.
        The anchors of the next deltas are not in it: they are fetched again by the digest of their commit.
        """
        learner, engine, loop = self._joined()
        if isinstance(engine, GossipNode) and isinstance(learner, GossipLearner):
            return gossip_state(engine, learner)
        assert isinstance(learner, Learner) and isinstance(engine, Node)
        return saved_json(engine.run_id, learner.state, learner.memories, loop.run(engine.left_over()))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from ``state`` at the next :meth:`join`, with the model and the optimizer restored beforehand.

        Fragments that were merged since then start from their newest commit. Raises :class:`ConfigurationError` for
        anything that :meth:`state_dict` did not return.
        """
        if self._learner is not None or self._ended:
            raise SessionClosed("load_state_dict() after join().", "Load the state first, then join.")
        self._saved = None if is_gossip_state(state) else parse_saved(state)

    def _wait_until(self, done: Callable[[Learner | GossipLearner], bool], timeout: float | None) -> bool:
        """Wait for commits until ``done(learner)``; True if any was written. Gives up after ``timeout`` of silence."""
        learner = self._learner
        assert learner is not None
        started = progressed = time.monotonic()
        report_at = started + WAIT_REPORT_SECONDS
        changed = learner.align()
        while not done(learner):
            self._waiting = True
            try:
                self._news.wait(WAIT_SLICE_SECONDS)
            finally:
                self._waiting = False
            self._news.clear()
            self._raise_failure()
            now = time.monotonic()
            if learner.align():
                changed, progressed = True, now
            if timeout is not None and now - progressed > timeout:
                self._host.emit(RunWaited(f"no commit for {timeout:.0f} s: leaving without the rounds in flight"))
                break
            if now >= report_at:
                self._report_wait(now - started)
                report_at = now + 2 * (now - started)
        self._stall_seconds += time.monotonic() - started
        return changed

    def _serve(self) -> bool:
        """Hold the training while this node is the run's syncer; True if any commit was written meanwhile."""
        learner, engine, _ = self._joined()
        assert isinstance(learner, Learner)
        learner.hand_in()
        changed = False
        while engine.serving:
            self._raise_failure()
            self._waiting = True
            try:
                self._news.wait(WAIT_SLICE_SECONDS)
            finally:
                self._waiting = False
            self._news.clear()
            changed = learner.align() or changed
        learner.resume()
        return changed

    def _report_wait(self, seconds: float) -> None:
        assert self._learner is not None and self._engine is not None
        fragments = ", ".join(str(number) for number in self._learner.outstanding)
        here = ", ".join(self._engine.board.live_learners()) or "nobody"
        self._host.emit(RunWaited(f"waiting {seconds:.0f} s for the round of fragment {fragments} (live: {here})"))

    def _publish(self, snapshot: Snapshot) -> None:
        assert self._loop is not None and isinstance(self._engine, Node)
        self._loop.call(partial(self._engine.publish, snapshot))

    def _applied(self, commit: Commit) -> None:
        self._host.emit(self._noted(commit))

    # -- faults --------------------------------------------------------------------------------------------

    def _failed(self, failure: BaseException) -> None:
        self._news.set()

    def _raise_failure(self) -> None:
        failure = self._engine.failure if self._engine is not None else None
        if failure is None:
            return
        self.abort(f"{type(failure).__name__}: {failure}")
        if isinstance(failure, GradientMailError):
            raise SessionFailed(f"The session cannot go on: {failure.cause}", failure.remedy) from failure
        raise SessionFailed(f"The session cannot go on: {failure}", "This is a defect; please report it.") from failure

    def _leave_poisoned(self) -> None:
        cause = f"The run refused {POISONED_MOST} snapshots of {self.node} in a row for their values."
        detail = " They are not finite, or far too large."
        if isinstance(self._learner, GossipLearner):
            cause, detail = f"{POISONED_MOST} rounds of {self.node} in a row ended in values that are not finite.", ""
        self.abort(cause)
        raise SessionFailed(
            cause + detail, "Check this node's learning rate, data, precision and hardware before it joins again."
        )

    def _emitter(self, callbacks: Sequence[Callback]) -> Callback:
        lock = threading.RLock()
        emit = emitter(callbacks)

        def locked(event: Event) -> None:
            with lock:
                emit(event)

        return locked


async def _started(
    engine: Node,
    learner: Learner,
    commits: Sequence[Commit],
    failed: Callable[[BaseException], None],
    service: Callable[[], None],
    on: Continued,
) -> None:
    engine.start(learner, commits, failed, service)
    if on.residuals:
        engine.take_up(on.residuals)
