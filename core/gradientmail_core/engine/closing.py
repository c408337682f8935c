"""Closing a round: judge snapshots, merge them, step the outer optimizer, commit.

The order of writes is the crash argument: payloads first, each under a key that holds its digest, then the
record, created once. A closer that dies before the record leaves orphans and an open round, which another
closes from the same snapshots; one that is only slow finds the other's record in its place and goes on from
that. Equal inputs give equal payload bytes on every node, so it does not matter who closed.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.merge import Contribution, Merged, norm_of, piece_squares
from gradientmail_core.algorithms.outer import Outer, Reached, restated, without_memory
from gradientmail_core.algorithms.schedule import first_due_after
from gradientmail_core.algorithms.shares import settled
from gradientmail_core.algorithms.spool import Spool
from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.gathering import Accepted, Gathering, shares, speeds
from gradientmail_core.engine.loading import changed, made_by
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
    Share,
    SnapshotRecord,
    digest,
    parse_snapshot,
)
from gradientmail_core.tensors import recycled
from gradientmail_core.tensors.buffers import buffer_spans, wire_codec
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.compression import opened
from gradientmail_core.tensors.encoded import Encoded, InMemory
from gradientmail_core.tensors.kernels import is_finite, subtract
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.payload import (
    Body,
    Malformed,
    Payload,
    is_whole,
    parse_payload,
    payload_bytes_max,
    read_metadata,
)
from gradientmail_core.tensors.schema import FragmentLayout

SNAPSHOT_METADATA = "gradientmail"
REFUSALS_MOST = 1000


@dataclass(frozen=True, slots=True)
class OuterState:
    """What the outer optimizer goes on from: its own arrays, and what rounding left out of the parameters."""

    arrays: tuple[Flat, ...]
    residual: Flat | None = None


@dataclass(frozen=True, slots=True)
class Merger:
    """The result of a round: new parameters, new outer state, and the merge's mean pairwise cosine.

    ``change`` is there when it is published: what was encoded, so that the parameters before and its decoded form
    make ``theta``.
    """

    theta: Flat
    outer: OuterState
    cosine: float | None
    change: Flat | None = None


def judged(body: Body, node: str, round: int, head: Head, run: Run, spool: Spool | None = None) -> Accepted | Refusal:
    """A snapshot, or the reason it cannot be merged; decided from its bytes and the chain's head alone.

    It keeps the codec's own bytes, in ``spool`` if one is given: a merge decodes them span by span.
    """
    layout = run.layouts[head.fragment]
    codec = wire_codec(layout, run.settings.delta_codec)
    plain = opened(body, payload_bytes_max(layout, codec))
    if isinstance(plain, Malformed):
        return Refusal(node, "", "", "corrupt")
    payload = parse_payload(plain, layout, codec)
    if isinstance(payload, Malformed):
        return _unfit(plain, node, run)
    text = payload.metadata.get(SNAPSHOT_METADATA, "")
    record = parse_snapshot(text, run.id)
    if isinstance(record, Rejected):
        return Refusal(node, "", "", "run")
    reason = _reason_against(record, payload, node, round, head)
    delta = InMemory(codec, payload.parts)
    squares = np.zeros(0) if reason else piece_squares(delta.read, layout)
    norm = norm_of(squares)
    if reason is None and not np.isfinite(norm):
        reason = "nonfinite"
    if reason is not None:
        return Refusal(node, record.incarnation, digest(text), reason)
    clamped = _clamped(record, head, run)
    return Accepted(clamped, digest(text), _kept(delta, spool), norm, tuple(squares.tolist()))


def _unfit(plain: Body, node: str, run: Run) -> Refusal:
    """A body that is no payload of this fragment: of another schema if it is whole, and named if its writer says so."""
    metadata = read_metadata(plain)
    reason: Reason = "schema" if is_whole(plain) else "corrupt"
    text = "" if isinstance(metadata, Malformed) else metadata.get(SNAPSHOT_METADATA, "")
    record = parse_snapshot(text, run.id)
    if isinstance(record, Rejected) or record.node != node:
        return Refusal(node, "", "", reason)
    return Refusal(node, record.incarnation, digest(text), reason)


def _kept(delta: InMemory, spool: Spool | None) -> Encoded:
    if spool is None:
        return delta
    try:
        return spool.kept(delta)
    except OSError as error:  # a full disk: memory has to do
        spool.overflowed(error)
        return delta


def _reason_against(record: SnapshotRecord, payload: Payload, node: str, round: int, head: Head) -> Reason | None:
    if record.node != node or record.round != round:
        return "run"
    if record.data != payload.sha256:
        return "corrupt"
    if record.base != head.digest:
        return "stale"
    return "zero_steps" if record.steps == 0 else None


def _clamped(record: SnapshotRecord, head: Head, run: Run) -> SnapshotRecord:
    """The record with its tokens, and its clock, brought down to what its steps allow."""
    tokens = min(record.tokens, record.steps * run.settings.tokens_per_step_max)
    clock = min(record.clock, head.newest_step + record.steps + run.settings.sync_every)
    return replace(record, tokens=tokens, clock=clock)


def merger(run: Run, head: Head, theta: Flat, outer: OuterState, accepted: Sequence[Accepted]) -> Merger | None:
    """Merge and step; None if the result is not finite. Inputs stay as they are."""
    layout = run.layouts[head.fragment]
    contributions = [
        Contribution(snapshot.record.node, share, snapshot.delta.read, np.array(snapshot.squares))
        for snapshot, share in zip(accepted, shares(accepted, run.settings.joiner_ramp), strict=True)
    ]
    merged: Merged = run.settings.merge(contributions, layout, recycled.empty(layout.size))
    means = _buffer_means(layout, theta, merged.delta)
    master = theta if outer.residual is None else theta + outer.residual
    moved = _stepped(run.settings.outer, Reached(master, outer.arrays), merged.delta, head.version + 1, accepted)
    _set_buffers(means, moved)
    for part in moved.state:
        restated(part, codec_named(run.settings.momentum_dtype))
    result = stored(run.settings, theta, moved.theta, moved.state, merged.cosine, whole=holds_buffers(layout))
    return result if all(map(is_finite, (result.theta, *moved.state))) else None


def _stepped(outer: Outer, here: Reached, delta: Flat, version: int, accepted: Sequence[Accepted]) -> Reached:
    """The outer step, its parameters in the delta's place; ``here`` stays as it is."""
    if all(snapshot.record.final for snapshot in accepted):
        without_memory(outer).step(here.theta, delta, (), version, len(accepted), into=Reached(delta, ()))
        return Reached(delta, tuple(part.copy() for part in here.state))
    there = Reached(delta, tuple(recycled.empty(part.size) for part in here.state))
    outer.step(here.theta, delta, here.state, version, len(accepted), into=there)
    return there


def stored(
    settings: DiLoCo,
    theta: Flat,
    master: Flat,
    arrays: tuple[Flat, ...],
    cosine: float | None,
    *,
    whole: bool = False,
) -> Merger:
    """The step from ``theta`` to ``master`` as it will be stored, in the run's formats; ``whole`` without a change."""
    stored_as, change = codec_named(settings.master_dtype), None
    if settings.commit_codec is None or whole:
        moved = master.copy() if settings.keeps_residual else master
        restated(moved, stored_as)
    else:
        change = master - theta
        decoded = change.copy()
        restated(decoded, codec_named(settings.commit_codec))
        moved = changed(theta, decoded, stored_as)
    residual = None
    if settings.keeps_residual and (change is not None or settings.master_dtype != "F32"):
        residual = master
        subtract(master, moved, residual)
        restated(residual, codec_named(settings.residual_dtype or "F32"))
    return Merger(moved, OuterState(arrays, residual), cosine, change)


def holds_buffers(layout: FragmentLayout) -> bool:
    """Whether a fragment holds statistics, which a change rounded for the whole fragment would spoil.

    Codecs of few bits share a scale among neighbours: beside a large change of a weight, a small variance could come
    out below zero. So such a fragment is committed whole.
    """
    return bool(buffer_spans(layout))


def _buffer_means(layout: FragmentLayout, theta: Flat, delta: Flat) -> list[tuple[slice, Flat]]:
    """Where buffers lie, and their mean over the nodes."""
    return [(place, theta[place] - delta[place]) for place in buffer_spans(layout)]


def _set_buffers(means: Sequence[tuple[slice, Flat]], moved: Reached) -> None:
    """Statistics become their mean: momentum would carry them past it, a variance below zero."""
    for place, mean in means:
        moved.theta[place] = mean
        for part in moved.state:
            part[place] = 0.0


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
    host: Host, run: Run, head: Head, result: Merger, state_layout: FragmentLayout, *, whole: bool = False
) -> tuple[Section, ...]:
    """Write the committed payloads of the round after ``head`` side by side; ``whole`` parameters, or when due."""
    settings, layout, round = run.settings, run.layouts[head.fragment], head.next_round(run.fragments)
    put = partial(put_section, host.mailbox, host.clock, link=host.link, compression=settings.compression)
    writes = []
    if whole or result.change is None or (head.version + 1) % settings.full_every == 0:
        writes.append(put("theta", round, host.node, layout, result.theta, codec=settings.master_dtype))
    if result.change is not None and settings.commit_codec is not None:
        makes = await host.clock.compute(lambda: made_by(result.theta, codec_named(settings.master_dtype)))
        writes.append(put("change", round, host.node, layout, result.change, codec=settings.commit_codec, makes=makes))
    if result.outer.arrays:
        flat = result.outer.arrays[0] if len(result.outer.arrays) == 1 else np.concatenate(result.outer.arrays)
        writes.append(put("outer", round, host.node, state_layout, flat, codec=settings.momentum_dtype))
    if result.outer.residual is not None and settings.residual_dtype is not None:
        codec = settings.residual_dtype
        writes.append(put("residual", round, host.node, layout, result.outer.residual, codec=codec))
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
    skipped: int | None = None,
    live: Collection[str] = (),
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
        for snapshot, share in zip(
            gathering.accepted, shares(gathering.accepted, run.settings.joiner_ramp), strict=True
        )
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
        skipped=skipped,
        cosine=cosine,
        merged_tokens=min(head.merged_tokens + sum(participant.tokens for participant in participants), COUNT_MAX),
        final=gathering.final,
        shares=_batch_shares(run, head, gathering, live),
    )


def _batch_shares(run: Run, head: Head, gathering: Gathering, live: Collection[str]) -> tuple[Share, ...]:
    """How the ``live`` learners share the batch from here on, where speed decides."""
    whole = run.settings.global_batch_size
    if run.settings.share != "speed" or whole is None or head.fragment != 0:
        return ()
    before = head.record.shares if head.record is not None else ()
    measured = speeds(gathering.accepted)
    return settled(whole, before, measured, live or measured.keys() or {share.node for share in before})


def _named_refusals(refused: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """The refusals in node order; of a flood, those of real snapshots first, and no more than a record has room for."""
    kept = sorted(refused, key=lambda refusal: (not refusal.snapshot, refusal.node))[:REFUSALS_MOST]
    return tuple(sorted(kept, key=lambda refusal: refusal.node))
