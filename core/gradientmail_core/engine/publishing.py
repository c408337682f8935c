"""A snapshot's way into the mailbox: delta, codec, digest, upload, in that order and off the training thread.

The record travels in the payload's own metadata, so a snapshot is one object and appears whole or not at all.
A snapshot whose base is no longer the chain's head is not uploaded: its round is closed, and the commit that
closed it is on its way to the learner.
"""

from dataclasses import dataclass

from gradientmail_core.engine.closing import SNAPSHOT_METADATA
from gradientmail_core.engine.learner import Snapshot
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.protocol.records import SnapshotRecord, digest
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.kernels import subtract
from gradientmail_core.tensors.payload import encode_payload
from gradientmail_core.tensors.schema import FragmentLayout


@dataclass(frozen=True, slots=True)
class Published:
    """This node's snapshot for an open round: its digest, its bytes, and when it was encoded."""

    round: int
    digest: str
    body: bytearray
    at: float


def encoded_snapshot(host: Host, run: Run, snapshot: Snapshot, round: int, layout: FragmentLayout) -> Published:
    """The snapshot as the mailbox will hold it. ``snapshot.values`` becomes the delta, base minus trained."""
    subtract(snapshot.base, snapshot.values, snapshot.values)
    codec = codec_named(run.settings.delta_codec)
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
        )
        texts.append(record.encoded())
        return {SNAPSHOT_METADATA: texts[-1]}

    body = encode_payload(layout, codec, snapshot.values, describe)
    return Published(round, digest(texts[-1]), body, host.clock.now())
