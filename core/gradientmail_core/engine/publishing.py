"""A snapshot's way into the mailbox: delta, codec, digest, upload, in that order and off the training thread.

The record travels in the payload's own metadata, so a snapshot is one object and appears whole or not at all.
A snapshot whose base is no longer the chain's head is not uploaded: its round is closed, and the commit that
closed it is on its way to the learner.

With error feedback the delta is first made good for what the codec left out of earlier ones, and what it leaves out
of this one is handed back: it becomes the fragment's residual if the round's record lists the snapshot.
"""

from dataclasses import dataclass
from functools import partial

from gradientmail_core.engine.closing import SNAPSHOT_METADATA
from gradientmail_core.engine.learner import Snapshot
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.protocol.records import SnapshotRecord, digest
from gradientmail_core.tensors.buffers import wire_codec
from gradientmail_core.tensors.error_feedback import Feedback, Residual, compensated, for_codec, residual_after
from gradientmail_core.tensors.kernels import subtract
from gradientmail_core.tensors.payload import data_parts, encode_payload
from gradientmail_core.tensors.schema import FragmentLayout


@dataclass(frozen=True, slots=True)
class Published:
    """This node's snapshot for an open round: its digest, its bytes, and when it was encoded.

    ``residual`` is what the codec left out of it; None without error feedback.
    """

    round: int
    digest: str
    body: bytearray
    at: float
    residual: Residual | None = None


def encoded_snapshot(
    host: Host, run: Run, snapshot: Snapshot, round: int, layout: FragmentLayout, feedback: Feedback | None = None
) -> Published:
    """The snapshot as the mailbox will hold it. ``snapshot.values`` becomes the delta, base minus trained.

    ``feedback`` is the fragment's, if error feedback is on.
    """
    subtract(snapshot.base, snapshot.values, snapshot.values)
    codec = wire_codec(layout, run.settings.delta_codec)
    decay = run.settings.feedback_decay
    if feedback is not None and decay is not None:
        settled = for_codec(feedback, codec.name).settled
        compensated(snapshot.values, settled, snapshot.values, decay)
    texts: list[str] = []

    def describe(data: str) -> dict[str, str]:
        record = SnapshotRecord(
            run=run.id,
            round=round,
            node=host.node,
            incarnation=host.incarnation,
            base=snapshot.record,
            data=data,
            codec=codec.name,
            steps=snapshot.steps,
            tokens=snapshot.tokens,
            local_step=snapshot.local_step,
            step_seconds=snapshot.step_seconds,
            early=snapshot.early,
            final=snapshot.final,
            age=snapshot.age,
            clock=snapshot.clock,
        )
        texts.append(record.encoded())
        return {SNAPSHOT_METADATA: texts[-1]}

    body = encode_payload(layout, codec, snapshot.values, describe)
    residual = None
    if feedback is not None:
        decode = partial(codec.decode, data_parts(body, layout, codec))
        residual = residual_after(snapshot.values, decode, run.settings.residual_dtype or "F32")
    return Published(round, digest(texts[-1]), body, host.clock.now(), residual)
