"""A node that only closes rounds: no model, no training framework, one event loop.

It learns everything from the run's manifest, so it is given a mailbox and nothing else. While it lives the learners
hand their fragments over to it; when it goes, or dies, they close for themselves again.
"""

import asyncio
import random
import secrets
from collections.abc import Coroutine, Sequence

from gradientmail_core.clock import Clock, SystemClock
from gradientmail_core.engine.joining import Found, find_run
from gradientmail_core.engine.node import Node
from gradientmail_core.engine.run import Host
from gradientmail_core.events import Callback, RunWaited, emitter, log_event
from gradientmail_core.mailbox import Mailbox
from gradientmail_core.mailbox.retrying import RetryingMailbox
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.protocol.plan import manifest_schema
from gradientmail_core.session.leaving import left

LOOK_SECONDS = 2.0
REPORT_SECONDS = 60.0


async def serve(
    mailbox: Mailbox,
    *,
    node: str,
    stopping: asyncio.Event,
    timeouts: Timeouts | None = None,
    clock: Clock | None = None,
    callbacks: Sequence[Callback] = (log_event,),
) -> int:
    """Close the run's rounds until ``stopping`` is set, then leave; the commits it has seen.

    Waits for the run to be created. Raises what ends a session: a mailbox that refuses, a run it cannot read.
    """
    timeouts, clock, emit = timeouts or Timeouts(), clock or SystemClock(), emitter(callbacks)
    entropy = random.Random(secrets.randbits(64))
    patient = RetryingMailbox(mailbox, clock, entropy, emit)
    host = Host(node, secrets.token_hex(8), patient, clock, entropy, timeouts, emit)
    engine = Node(host, None, role="syncer")
    try:
        if await _unless(stopping, _entered(host, engine, stopping)):
            await _closing(host, engine, stopping)
        else:
            await engine.abort("told to stop before it took part")
    except BaseException as error:
        await engine.abort(f"{type(error).__name__}: {error}")
        raise
    return engine.rounds_seen


async def _created(host: Host, stopping: asyncio.Event) -> Found | None:
    """The run, once a learner has created it; None if this node is to stop before."""
    report_at = host.clock.now()
    while not stopping.is_set():
        if host.clock.now() >= report_at:
            host.emit(RunWaited(f"there is no run at {host.mailbox.url} yet: waiting for a learner to create it"))
            report_at = host.clock.now() + REPORT_SECONDS
        await host.clock.sleep(LOOK_SECONDS)
        if (found := await find_run(host)) is not None:
            return found
    return None


async def _unless(stopping: asyncio.Event, work: Coroutine[object, None, bool]) -> bool:
    """The result of ``work``; False, with it cancelled, if it has none when this node is to stop."""
    working, told = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
        return working.done() and working.result()
    finally:
        told.cancel()
        working.cancel()


async def _entered(host: Host, engine: Node, stopping: asyncio.Event) -> bool:
    """Join the run and begin to close its rounds; False if this node is to stop before there is one."""
    found = await engine.enter() or await _created(host, stopping)
    if found is None:
        return False
    commits = await engine.join(found, manifest_schema(found.manifest), found.manifest.frozen, found.layouts, ())
    await engine.wait_for_nodes()
    engine.start(None, commits, lambda failure: stopping.set())
    return True


async def _closing(host: Host, engine: Node, stopping: asyncio.Event) -> None:
    await stopping.wait()
    if engine.failure is not None:
        raise engine.failure
    engine.prepare_to_leave()
    await left(host, engine, engine.patience)
