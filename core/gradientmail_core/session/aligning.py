"""Looking up a run's newest parameters, or a node's hand-off, without taking part: nothing is written."""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.adapters import resolve
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.gossip import NAME, gossip_from
from gradientmail_core.clock import SystemClock
from gradientmail_core.engine.gossip_shares import GossipRun
from gradientmail_core.engine.handoff import HandoffStore
from gradientmail_core.engine.joining import Found, find_run, load_heads
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.errors import ConfigurationError, RunMismatch, SchemaMismatch
from gradientmail_core.events import Callback, emitter, log_event
from gradientmail_core.mailbox import Mailbox, open_mailbox
from gradientmail_core.mailbox.retrying import RetryingMailbox
from gradientmail_core.protocol.belongings import Belongings
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.protocol.plan import manifest_schema
from gradientmail_core.session.background import Loop
from gradientmail_core.session.gossiping import newest_model
from gradientmail_core.tensors.model import Flat, Model
from gradientmail_core.tensors.schema import schema_difference


@dataclass(frozen=True, slots=True)
class Committed:
    """What a run committed last: its id and step, and every tensor under its canonical name, fp32 in its own shape."""

    run: str
    step: int
    tensors: Mapping[str, NDArray[np.float32]]


def align(model: object, *, mailbox: str | os.PathLike[str] | Mailbox) -> int:
    """Write the newest committed parameters into ``model`` without joining; the run's step.

    Raises :class:`RunMismatch` if there is no run, :class:`SchemaMismatch` if it is of another model.
    """
    adapted: list[Model] = []

    def check(found: Found) -> None:
        schema = manifest_schema(found.manifest)
        merges_buffers = any(tensor.role == "buffer" for tensor in schema.tensors)
        adapted.append(resolve(model, buffers="mean" if merges_buffers else "local"))
        differences = schema_difference(adapted[0].schema, schema)
        if differences:
            raise SchemaMismatch(
                "The run has other tensors than this model:\n  " + "\n  ".join(differences) + "\n",
                "Build the run's model.",
            )

    found, newest, step = _looked_up(mailbox, check)
    for layout, values in zip(found.layouts, newest, strict=True):
        adapted[0].write(layout, values)
    return step


def committed(mailbox: str | os.PathLike[str] | Mailbox) -> Committed:
    """The newest committed parameters of the run at ``mailbox``, without a model or a framework.

    Raises :class:`RunMismatch` if there is no run.
    """
    found, newest, step = _looked_up(mailbox, lambda found: None)
    schema = manifest_schema(found.manifest)
    tensors = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in schema.tensors}
    for layout, flat in zip(found.layouts, newest, strict=True):
        for piece in layout.pieces:
            values = flat[piece.offset : piece.offset + piece.elements].reshape(piece.shape)
            whole = tensors[piece.name]
            (whole if piece.rows is None else whole[slice(*piece.rows)])[...] = values
    return Committed(found.manifest.run, step, tensors)


def _looked_up(
    mailbox: str | os.PathLike[str] | Mailbox, check: Callable[[Found], None]
) -> tuple[Found, Sequence[Flat], int]:
    """The run, its newest parameters by fragment and its step; ``check`` may raise before parameters are loaded."""
    store = opened(mailbox, must_exist=True)
    with onlooking(store, "align") as (loop, host):
        found = loop.run(find_run(host))
        if found is None:
            raise RunMismatch(f"There is no run at {store.url}.", "Check the URL, or start a node first.")
        check(found)
        return found, *loop.run(_newest(host, found))


def handed_off(
    mailbox: str | os.PathLike[str] | Mailbox, node: str, callbacks: Sequence[Callback] = (log_event,)
) -> Belongings | None:
    """The newest hand-off of ``node``, as its session wrote it, without joining; None if there is none, or no run."""
    with onlooking(opened(mailbox), node, callbacks) as (loop, host):
        found = loop.run(find_run(host))
        return loop.run(HandoffStore(host, found.manifest.run).newest()) if found is not None else None


@contextmanager
def onlooking(store: Mailbox, node: str, callbacks: Sequence[Callback] = (log_event,)) -> Iterator[tuple[Loop, Host]]:
    """A loop, and a host of that name that only reads ``store``, which is closed at the end."""
    loop, clock, emit = Loop(), SystemClock(), emitter(callbacks)
    patient = RetryingMailbox(store, clock, random.Random(0), emit)
    try:
        yield loop, Host(node, "0", patient, clock, random.Random(0), Timeouts(), emit)
    finally:
        loop.run(patient.close())
        loop.stop()
        clock.close()


async def _newest(host: Host, found: Found) -> tuple[Sequence[Flat], int]:
    algorithm = found.manifest.algorithm
    if algorithm.get("name") == NAME:
        return await newest_model(host, found, GossipRun.of(found.manifest, found.layouts, gossip_from(algorithm)))
    settings = DiLoCo(sync_every=_count(algorithm, "sync_every"), fragments=len(found.layouts))
    commits = await load_heads(host, Run(found.manifest, found.digest, found.layouts, settings), {})
    return [commit.theta for commit in commits], max(commit.head.step for commit in commits)


def _count(settings: Mapping[str, object], name: str) -> int:
    value = settings.get(name)
    return value if isinstance(value, int) and value > 0 else 10**6


def opened(mailbox: str | os.PathLike[str] | Mailbox, *, must_exist: bool = False) -> Mailbox:
    """The mailbox that a user's argument means, which is a URL, a path or a mailbox."""
    if isinstance(mailbox, str | os.PathLike):
        return open_mailbox(mailbox, must_exist=must_exist)
    if not hasattr(mailbox, "create"):
        raise ConfigurationError(f"{mailbox!r} is no mailbox.", "Give a URL such as file:///shared/run, or a path.")
    return mailbox
