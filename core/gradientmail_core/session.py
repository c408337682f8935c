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

import asyncio
import operator
import os
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from gradientmail_core.adapters import resolve
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.clock import SystemClock
from gradientmail_core.engine.joining import find_run, load_heads
from gradientmail_core.engine.learner import POISONED_MOST, Commit, Learner, Snapshot, merged_tokens
from gradientmail_core.engine.node import Node
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.errors import (
    ConfigurationError,
    GradientMailError,
    RunMismatch,
    SchemaMismatch,
    SessionClosed,
    SessionFailed,
)
from gradientmail_core.events import Callback, Event, FragmentAligned, RunWaited, emitter, log_event
from gradientmail_core.mailbox import Mailbox, MeteredMailbox, open_mailbox
from gradientmail_core.mailbox.retrying import RetryingMailbox
from gradientmail_core.protocol.keys import checked_node
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.protocol.plan import manifest_schema
from gradientmail_core.tensors.model import Model
from gradientmail_core.tensors.schema import FragmentLayout, schema_difference

T = TypeVar("T")

WAIT_SLICE_SECONDS = 0.5
WAIT_REPORT_SECONDS = 10.0
JOIN_THREAD_SECONDS = 5.0


class Loop:
    """An event loop on a thread of its own; coroutines are run from outside and waited for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gradientmail", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, None, T]) -> T:
        """The coroutine's result; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, work: Callable[[], object]) -> None:
        """Call a plain function on the loop's thread, without waiting."""
        self._loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_THREAD_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class Session:
    """A node of a run, used from the training thread.

    ``model`` is a torch or MLX module, or anything that satisfies :class:`gradientmail_core.tensors.model.Model`.
    ``mailbox`` is a URL or a mailbox. ``node`` names this node (default: host name and random hex); ``min_nodes``
    holds the start of a run back until so many are there. ``lease_timeout`` and ``progress_timeout`` are in seconds.
    ``callbacks`` receive every event; the default logs them.
    """

    def __init__(
        self,
        model: object,
        *,
        mailbox: str | os.PathLike[str] | Mailbox,
        algorithm: DiLoCo,
        node: str | None = None,
        min_nodes: int = 1,
        lease_timeout: float = 120.0,
        progress_timeout: float = 300.0,
        close_timeout: float | None = None,
        callbacks: Sequence[Callback] = (log_event,),
    ) -> None:
        _check_numbers(min_nodes, lease_timeout, progress_timeout)
        if not isinstance(algorithm, DiLoCo):
            raise ConfigurationError(f"{algorithm!r} is no algorithm.", "Give DiLoCo(sync_every=..., fragments=...).")
        self._model: Model = resolve(model)
        self._algorithm = algorithm
        self._meter = MeteredMailbox(_opened(mailbox))
        self._min_nodes = min_nodes
        self._close_timeout = lease_timeout + 30.0 if close_timeout is None else close_timeout
        self.node = checked_node(node) if node is not None else default_node()
        self._clock = SystemClock()
        entropy = random.Random(secrets.randbits(64))
        emit = self._emitter(callbacks)
        self._host = Host(
            node=self.node,
            incarnation=secrets.token_hex(8),
            mailbox=RetryingMailbox(self._meter, self._clock, entropy, emit),
            clock=self._clock,
            random=entropy,
            timeouts=Timeouts(lease_timeout, progress_timeout),
            emit=emit,
        )
        self._loop: Loop | None = None
        self._engine: Node | None = None
        self._learner: Learner | None = None
        self._news = threading.Event()
        self._ended = False
        self._stall_seconds = 0.0
        self._last_aligned: FragmentAligned | None = None
        self._merged_rounds = 0

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
        self._engine = Node(self._host, self._algorithm, min_nodes=self._min_nodes)
        try:
            self._enter(self._loop, self._engine, layouts)
        except BaseException as error:
            self.abort(f"{type(error).__name__} while joining")
            raise

    def _enter(self, loop: Loop, engine: Node, layouts: Sequence[FragmentLayout]) -> None:
        found = loop.run(engine.enter())
        theta = []
        if found is None:
            for layout in layouts:
                theta.append(np.empty(layout.size, np.float32))
                self._model.read(layout, theta[-1])
        schema, frozen = self._model.schema, self._model.frozen_fingerprint
        commits = loop.run(engine.join(found, schema, frozen, layouts, theta))
        loop.run(engine.wait_for_nodes())
        self._learner = Learner(
            self._model,
            engine.layouts,
            commits,
            in_flight=self._algorithm.in_flight,
            overlap_steps=self._algorithm.overlap_steps,
            publish=self._publish,
            applied=self._applied,
            now=time.monotonic,
            delivered=self._news.set,
        )
        loop.run(_started(engine, self._learner, commits, self._failed))

    def close(self) -> None:
        """Wait for the rounds in flight, set the model to the newest commit, and leave. Safe to call twice.

        Gives up waiting when nothing arrives for ``close_timeout`` seconds.
        """
        if self._ended or self._loop is None or self._engine is None or self._learner is None:
            self._ended = True
            return
        self._raise_failure()
        try:
            self._learner.finish()
            self._loop.call(self._engine.prepare_to_leave)
            self._wait_until(lambda learner: not learner.outstanding, self._close_timeout)
            self._loop.run(self._engine.leave(min(self._close_timeout, self._host.timeouts.lease)))
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
        try:
            self._loop.run(self._engine.abort(reason))
        finally:
            self._end()

    def _end(self) -> None:
        self._ended = True
        if self._loop is not None:
            try:
                self._loop.run(self._meter.close())
            finally:
                self._loop.stop()
        self._clock.close()

    # -- training ------------------------------------------------------------------------------------------

    def step(self, samples: int = 1) -> bool:
        """Count one optimizer step on ``samples`` samples (or tokens; the same unit on every node).

        True if committed parameters were written into the model. Raises :class:`SessionFailed` when the store
        refused for good.
        """
        learner = self._learner
        if samples.__class__ is not int or samples < 0:
            samples = _whole(samples)
        if learner is None or self._ended:
            raise SessionClosed("step() outside a joined session.", "Use it between join() and close().")
        changed = learner.step(samples)
        if self._engine is not None and self._engine.failure is not None:
            self._raise_failure()
        if learner.blocked:
            changed = self._wait_until(lambda held: not held.blocked, None) or changed
            learner.resume()
        if learner.poisoned:
            self._leave_poisoned()
        return changed

    def _wait_until(self, done: Callable[[Learner], bool], timeout: float | None) -> bool:
        """Wait for commits until ``done(learner)``; True if any was written. Gives up after ``timeout`` of silence."""
        learner = self._learner
        assert learner is not None
        started = progressed = time.monotonic()
        report_at = started + WAIT_REPORT_SECONDS
        changed = learner.align()
        while not done(learner):
            self._news.wait(WAIT_SLICE_SECONDS)
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

    def _report_wait(self, seconds: float) -> None:
        assert self._learner is not None and self._engine is not None
        fragments = ", ".join(str(number) for number in self._learner.outstanding)
        here = ", ".join(self._engine.board.live_learners()) or "nobody"
        self._host.emit(RunWaited(f"waiting {seconds:.0f} s for the round of fragment {fragments} (live: {here})"))

    def _publish(self, snapshot: Snapshot) -> None:
        assert self._loop is not None and self._engine is not None
        self._loop.call(partial(self._engine.publish, snapshot))

    def _applied(self, commit: Commit) -> None:
        record = commit.head.record
        aligned = FragmentAligned(
            fragment=commit.head.fragment,
            round=record.round if record is not None else 0,
            step=commit.head.step,
            participants=len(record.participants) if record is not None else 0,
            tokens=merged_tokens(record),
            merged=commit.merged,
            cosine=record.cosine if record is not None else None,
        )
        self._last_aligned = aligned
        self._merged_rounds += commit.merged
        self._host.emit(aligned)

    # -- what a user reads ---------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """The run's clock as this node knows it, in optimizer steps."""
        return self._learner.state.global_step if self._learner is not None else 0

    @property
    def rounds_seen(self) -> int:
        """Commits of the run, all fragments together."""
        return self._engine.rounds_seen if self._engine is not None else 0

    @property
    def versions(self) -> tuple[int, ...]:
        """For each fragment, the version the model was last aligned with."""
        return tuple(track.version for track in self._learner.state.tracks) if self._learner is not None else ()

    @property
    def batch_size(self) -> int | None:
        """This node's share of ``global_batch_size``, rounded up; None if none was set."""
        whole = self._algorithm.global_batch_size
        if whole is None:
            return None
        return -(-whole // (self._engine.live_learners if self._engine is not None else 1))

    def metrics(self) -> dict[str, float]:
        """Figures for a progress bar or a logger, by name."""
        usage = self._meter.usage
        figures = {
            "round": float(self.rounds_seen),
            "live_nodes": float(self._engine.live_learners if self._engine is not None else 0),
            "merged_tokens": float(self._engine.merged_tokens if self._engine is not None else 0),
            "merged_rounds": float(self._merged_rounds),
            "bytes_up": float(usage.bytes_up),
            "bytes_down": float(usage.bytes_down),
            "requests": float(usage.requests),
            "stall_seconds": self._stall_seconds,
            "global_step": float(self.global_step),
        }
        if self._last_aligned is not None:
            figures["participants"] = float(self._last_aligned.participants)
            if self._last_aligned.cosine is not None:
                figures["cosine"] = self._last_aligned.cosine
        return figures

    # -- faults --------------------------------------------------------------------------------------------

    def _failed(self, failure: BaseException) -> None:
        self._news.set()

    def _raise_failure(self) -> None:
        failure = self._engine.failure if self._engine is not None else None
        if failure is None:
            return
        self.abort(f"{type(failure).__name__}: {failure}")
        remedy = failure.remedy if isinstance(failure, GradientMailError) else "This is a defect; please report it."
        raise SessionFailed(f"The session cannot go on: {failure}", remedy) from failure

    def _leave_poisoned(self) -> None:
        cause = f"The run refused {POISONED_MOST} snapshots of {self.node} in a row for their values."
        self.abort(cause)
        raise SessionFailed(
            f"{cause} They are not finite, or far too large.",
            "Check this node's data, precision and hardware before it joins again.",
        )

    def _emitter(self, callbacks: Sequence[Callback]) -> Callback:
        lock = threading.RLock()
        emit = emitter(callbacks)

        def locked(event: Event) -> None:
            with lock:
                emit(event)

        return locked


async def _started(
    engine: Node, learner: Learner, commits: Sequence[Commit], failed: Callable[[BaseException], None]
) -> None:
    engine.start(learner, commits, failed)


def align(model: object, *, mailbox: str | os.PathLike[str] | Mailbox) -> int:
    """Write the newest committed parameters into ``model`` without joining; the run's step.

    Raises :class:`RunMismatch` if there is no run, :class:`SchemaMismatch` if it is of another model.
    """
    loop = Loop()
    try:
        return _aligned(loop, resolve(model), _opened(mailbox, must_exist=True))
    finally:
        loop.stop()


def _aligned(loop: Loop, model: Model, mailbox: Mailbox) -> int:
    clock = SystemClock()
    emit = emitter((log_event,))
    patient = RetryingMailbox(mailbox, clock, random.Random(0), emit)
    host = Host("align", "0", patient, clock, random.Random(0), Timeouts(), emit)
    try:
        found = loop.run(find_run(host))
        if found is None:
            raise RunMismatch(f"There is no run at {mailbox.url}.", "Check the URL, or start a node first.")
        differences = schema_difference(model.schema, manifest_schema(found.manifest))
        if differences:
            raise SchemaMismatch(
                "The run has other tensors than this model:\n  " + "\n  ".join(differences) + "\n",
                "Build the run's model.",
            )
        settings = DiLoCo(sync_every=_count(found.manifest.algorithm, "sync_every"), fragments=len(found.layouts))
        commits = loop.run(load_heads(host, Run(found.manifest, found.digest, found.layouts, settings), {}))
        for commit in commits:
            model.write(found.layouts[commit.head.fragment], commit.theta)
        return max(commit.head.step for commit in commits)
    finally:
        loop.run(mailbox.close())
        clock.close()


def _count(settings: Mapping[str, object], name: str) -> int:
    value = settings.get(name)
    return value if isinstance(value, int) and value > 0 else 10**6


def _opened(mailbox: str | os.PathLike[str] | Mailbox, *, must_exist: bool = False) -> Mailbox:
    if isinstance(mailbox, str | os.PathLike):
        return open_mailbox(mailbox, must_exist=must_exist)
    if not hasattr(mailbox, "create"):
        raise ConfigurationError(f"{mailbox!r} is no mailbox.", "Give a URL such as file:///shared/run, or a path.")
    return mailbox


def _whole(samples: object) -> int:
    """``samples`` as a plain count, whatever kind of integer it is (numpy's, a tensor of one element)."""
    try:
        count = operator.index(samples)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(f"step({samples!r}) is no number of samples.", "Give a whole number.") from None
    if count < 0:
        raise ConfigurationError(f"step({count}) claims a negative number of samples.", "Count from 0.")
    return count


def default_node() -> str:
    """A name for this process: the host's, shortened to what a key allows, and six random hex digits."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:40] or "node"
    return f"{host}-{secrets.token_hex(3)}"


def _check_numbers(min_nodes: int, lease_timeout: float, progress_timeout: float) -> None:
    if min_nodes < 1:
        raise ConfigurationError(f"min_nodes is {min_nodes}.", "Use 1 or more.")
    if lease_timeout <= 0 or progress_timeout <= 0:
        raise ConfigurationError("A timeout is not positive.", "Use seconds above 0, such as lease_timeout=120.")
