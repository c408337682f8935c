"""Closing a round: judge snapshots, merge them, step the outer optimizer, commit.

The order of writes is the crash argument: payloads first, each under a key that holds its digest, then the
record, created once. A closer that dies before the record leaves orphans and an open round, which another
closes from the same snapshots; one that is only slow finds the other's record in its place and goes on from
that. Equal inputs give equal payload bytes on every node, so it does not matter who closed.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gradientmail_core.algorithms.merge import Contribution, Merged
from gradientmail_core.algorithms.schedule import first_due_after
from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.gathering import Accepted, Gathering, shares
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.protocol.exchange import put_section
from gradientmail_core.protocol.fields import COUNT_MAX, Rejected
from gradientmail_core.protocol.records import (
    Estimates,
    Participant,
    Reason,
    Refusal,
    RoundRecord,
    Section,
    SnapshotRecord,
    digest,
    parse_snapshot,
)
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.kernels import BLOCK, is_finite
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.payload import Malformed, Payload, parse_payload
from gradientmail_core.tensors.schema import FragmentLayout

SNAPSHOT_METADATA = "gradientmail"
REFUSALS_MOST = 1000


@dataclass(frozen=True, slots=True)
class Merger:
    """The result of a round: new parameters, new outer state, and the merge's mean pairwise cosine."""

    theta: Flat
    outer: tuple[Flat, ...]
    cosine: float | None


def judged(body: bytes | bytearray, node: str, round: int, head: Head, run: Run) -> Accepted | Refusal:
    """A snapshot, or the reason it cannot be merged; decided from its bytes and the chain's head alone."""
    layout = run.layouts[head.fragment]
    payload = parse_payload(body, layout, codec_named(run.settings.delta_codec))
    if isinstance(payload, Malformed):
        return Refusal(node, "", "", "corrupt")
    text = payload.metadata.get(SNAPSHOT_METADATA, "")
    record = parse_snapshot(text, run.id)
    if isinstance(record, Rejected):
        return Refusal(node, "", "", "run")
    reason = _reason_against(record, payload, node, round, head)
    norm = 0.0 if reason else delta_norm(payload, layout, run.settings.delta_codec)
    if reason is None and not np.isfinite(norm):
        reason = "nonfinite"
    if reason is not None:
        return Refusal(node, record.incarnation, digest(text), reason)
    return Accepted(_clamped(record, run.settings.tokens_per_step_max), digest(text), payload, norm)


def _reason_against(record: SnapshotRecord, payload: Payload, node: str, round: int, head: Head) -> Reason | None:
    if record.node != node or record.round != round:
        return "run"
    if record.data != payload.sha256:
        return "corrupt"
    if record.base != head.digest:
        return "stale"
    return "zero_steps" if record.steps == 0 else None


def _clamped(record: SnapshotRecord, tokens_per_step_max: int) -> SnapshotRecord:
    most = record.steps * tokens_per_step_max
    if record.tokens <= most:
        return record
    return replace(record, tokens=most)


def delta_norm(payload: Payload, layout: FragmentLayout, codec_name: str) -> float:
    """L2 norm of a payload's delta, decoded block by block; inf or nan if any value is not finite."""
    codec = codec_named(codec_name)
    total = 0.0
    block = np.empty(min(BLOCK, layout.size), np.float32)
    for start in range(0, layout.size, BLOCK):
        part = block[: min(BLOCK, layout.size - start)]
        codec.decode(payload.parts, start, start + part.size, part)
        with np.errstate(invalid="ignore"):
            total += float(np.add.reduce(np.square(part, dtype=np.float64)))
    return float(np.sqrt(total))


def merger(run: Run, head: Head, theta: Flat, outer: Sequence[Flat], accepted: Sequence[Accepted]) -> Merger | None:
    """Merge and step; None if the result is not finite. Inputs stay as they are."""
    layout = run.layouts[head.fragment]
    codec = codec_named(run.settings.delta_codec)
    contributions = [
        Contribution(snapshot.record.node, share, partial(codec.decode, snapshot.payload.parts))
        for snapshot, share in zip(accepted, shares(accepted), strict=True)
    ]
    merged: Merged = run.settings.merge(contributions, layout)
    moved = theta.copy()
    state = tuple(part.copy() for part in outer)
    run.settings.outer.step(moved, merged.delta, state, head.version + 1, len(accepted))
    _average_buffers(layout, theta, merged.delta, moved, state)
    if not is_finite(moved) or not all(is_finite(part) for part in state):
        return None
    return Merger(moved, state, merged.cosine)


def _average_buffers(layout: FragmentLayout, theta: Flat, delta: Flat, moved: Flat, state: Sequence[Flat]) -> None:
    """Statistics become their mean over the nodes: momentum would carry them past it, a variance below zero."""
    for piece in layout.pieces:
        if piece.role == "buffer":
            span = slice(piece.offset, piece.offset + piece.elements)
            moved[span] = theta[span] - delta[span]
            for part in state:
                part[span] = 0.0


def outer_layout(layout: FragmentLayout, names: Sequence[str]) -> FragmentLayout:
    """The layout of the outer optimizer's state: the fragment's pieces once for each of ``names``."""
    return FragmentLayout(
        layout.fragment,
        tuple(
            replace(piece, name=f"{name}/{piece.name}", offset=index * layout.size + piece.offset)
            for index, name in enumerate(names)
            for piece in layout.pieces
        ),
    )


async def put_sections(
    host: Host, layout: FragmentLayout, outer_layout: FragmentLayout, round: int, result: Merger
) -> tuple[Section, ...]:
    """Write the committed payloads of a round side by side."""
    writes = [put_section(host.mailbox, host.clock, "theta", round, host.node, layout, result.theta)]
    if result.outer:
        flat = result.outer[0] if len(result.outer) == 1 else np.concatenate(result.outer)
        writes.append(put_section(host.mailbox, host.clock, "outer", round, host.node, outer_layout, flat))
    return tuple(await asyncio.gather(*writes))


def round_record(
    host: Host,
    run: Run,
    head: Head,
    *,
    gathering: Gathering,
    sections: Sequence[Section],
    estimates: Estimates,
    cosine: float | None,
    newest_step: int,
    closer: str,
) -> RoundRecord:
    """The record that commits the round after ``head``; without ``gathering.accepted`` it is void."""
    newest = max(newest_step, head.due)
    participants = tuple(
        Participant(
            node=snapshot.record.node,
            incarnation=snapshot.record.incarnation,
            snapshot=snapshot.digest,
            steps=snapshot.record.steps,
            tokens=snapshot.record.tokens,
            weight=share,
        )
        for snapshot, share in zip(gathering.accepted, shares(gathering.accepted), strict=True)
    )
    return RoundRecord(
        run=run.id,
        round=head.next_round(run.fragments),
        node=host.node,
        nonce=host.nonce(),
        prev=head.digest,
        step=head.due,
        next_step=first_due_after(newest, head.fragment, run.fragments, run.settings.sync_every),
        newest_step=newest,
        closer=closer,
        sections=tuple(sections),
        participants=tuple(sorted(participants, key=lambda participant: participant.node)),
        refusals=_named_refusals(gathering.refused),
        estimates=estimates,
        cosine=cosine,
        merged_tokens=min(head.merged_tokens + sum(participant.tokens for participant in participants), COUNT_MAX),
    )


def _named_refusals(refused: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """The refusals in node order; of a flood, those of real snapshots first, and no more than a record has room for."""
    kept = sorted(refused, key=lambda refusal: (not refusal.snapshot, refusal.node))[:REFUSALS_MOST]
    return tuple(sorted(kept, key=lambda refusal: refusal.node))
