"""Loading a run's newest committed parameters without taking part: nothing is written, nobody notices."""

import os
import random
from collections.abc import Mapping

from gradientmail_core.adapters import resolve
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.clock import SystemClock
from gradientmail_core.engine.joining import find_run, load_heads
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.errors import ConfigurationError, RunMismatch, SchemaMismatch
from gradientmail_core.events import emitter, log_event
from gradientmail_core.mailbox import Mailbox, open_mailbox
from gradientmail_core.mailbox.retrying import RetryingMailbox
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.protocol.plan import manifest_schema
from gradientmail_core.session.background import Loop
from gradientmail_core.tensors.schema import schema_difference


def align(model: object, *, mailbox: str | os.PathLike[str] | Mailbox) -> int:
    """Write the newest committed parameters into ``model`` without joining; the run's step.

    Raises :class:`RunMismatch` if there is no run, :class:`SchemaMismatch` if it is of another model.
    """
    loop = Loop()
    try:
        return _aligned(loop, model, opened(mailbox, must_exist=True))
    finally:
        loop.stop()


def _aligned(loop: Loop, bare: object, mailbox: Mailbox) -> int:
    clock = SystemClock()
    emit = emitter((log_event,))
    patient = RetryingMailbox(mailbox, clock, random.Random(0), emit)
    host = Host("align", "0", patient, clock, random.Random(0), Timeouts(), emit)
    try:
        found = loop.run(find_run(host))
        if found is None:
            raise RunMismatch(f"There is no run at {mailbox.url}.", "Check the URL, or start a node first.")
        schema = manifest_schema(found.manifest)
        merges_buffers = any(tensor.role == "buffer" for tensor in schema.tensors)
        model = resolve(bare, buffers="mean" if merges_buffers else "local")
        differences = schema_difference(model.schema, schema)
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


def opened(mailbox: str | os.PathLike[str] | Mailbox, *, must_exist: bool = False) -> Mailbox:
    """The mailbox that a user's argument means, which is a URL, a path or a mailbox."""
    if isinstance(mailbox, str | os.PathLike):
        return open_mailbox(mailbox, must_exist=must_exist)
    if not hasattr(mailbox, "create"):
        raise ConfigurationError(f"{mailbox!r} is no mailbox.", "Give a URL such as file:///shared/run, or a path.")
    return mailbox
