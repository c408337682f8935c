"""Closing: what is merged and why not, equal bytes from equal inputs, and records that every reader takes."""

import errno
import json
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.algorithms.merge import WeightedMean, norm_of, piece_squares
from gradientmail_core.algorithms.outer import SGD, Adam, Nesterov
from gradientmail_core.algorithms.schedule import is_due
from gradientmail_core.algorithms.spool import Spool
from gradientmail_core.engine.closing import (
    SNAPSHOT_METADATA,
    OuterState,
    judged,
    merger,
    outer_layout,
    put_sections,
    round_record,
)
from gradientmail_core.engine.gathering import Accepted, Gathering
from gradientmail_core.protocol.exchange import get_section
from gradientmail_core.protocol.fields import COUNT_MAX, Rejected
from gradientmail_core.protocol.records import Estimates, Refusal, RoundRecord, SnapshotRecord, digest, parse_round
from gradientmail_core.tensors import recycled
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.compression import compress, element_bytes
from gradientmail_core.tensors.encoded import InMemory
from gradientmail_core.tensors.payload import Malformed, encode_payload, parse_payload, read_metadata
from gradientmail_core.tensors.schema import FragmentLayout, Piece
from tests.core.engine.parts import SETTINGS, Place, first_head, run_of, snapshot_body, virtually

PLAIN = replace(SETTINGS, merge=WeightedMean(), outer=SGD(lr=1.0))
RUN = run_of(PLAIN)
HEAD = first_head(RUN)
ROUND = HEAD.next_round(RUN.fragments)
SIZE = RUN.layouts[0].size


def body_of(node: str = "a", delta: Any = 0.5, run: Any = RUN, **changes: Any) -> bytes:
    """A snapshot of a node for the open round."""

    async def main(place: Place) -> bytes:
        return snapshot_body(run, first_head(run), place.host(node), delta, **changes)

    return virtually(main)


def altered(body: bytes, **changes: Any) -> bytes:
    """The snapshot with other fields in its record, its data as they were."""
    codec = codec_named("F32")
    metadata = read_metadata(body)
    payload = parse_payload(body, RUN.layouts[0], codec)
    assert not isinstance(metadata, Malformed) and not isinstance(payload, Malformed)
    text = json.dumps({**json.loads(metadata[SNAPSHOT_METADATA]), **changes})
    return bytes(
        encode_payload(RUN.layouts[0], codec, payload.parts[0].view("<f4"), lambda _: {SNAPSHOT_METADATA: text})
    )


def verdict(body: bytes, node: str = "a", run: Any = RUN) -> Accepted | Refusal:
    return judged(body, node, ROUND, first_head(run), run)


def accepted(node: str = "a", delta: Any = 0.5, run: Any = RUN, **changes: Any) -> Accepted:
    found = verdict(body_of(node, delta, run, **changes), node, run)
    assert isinstance(found, Accepted), found
    return found


# -- judging -----------------------------------------------------------------------------------------------


def test_an_honest_snapshot_is_accepted() -> None:
    body = body_of()
    found = verdict(body)
    assert isinstance(found, Accepted)
    metadata = read_metadata(body)
    assert not isinstance(metadata, Malformed)
    assert found.digest == digest(metadata[SNAPSHOT_METADATA])
    assert (found.record.node, found.record.steps, found.record.tokens) == ("a", 20, 160)
    assert found.norm == pytest.approx(0.5 * SIZE**0.5)


@pytest.mark.parametrize(
    ("reason", "body"),
    [
        ("zero_steps", body_of(steps=0)),
        ("stale", body_of(record="9" * 64)),
        ("nonfinite", body_of(delta=np.nan)),
        ("nonfinite", body_of(delta=np.inf)),
        ("nonfinite", body_of(delta=np.where(np.arange(SIZE) == 7, -np.inf, 0))),
        ("corrupt", b""),
        ("corrupt", b"\xff" * 1000),
        ("corrupt", body_of()[:-4]),
        ("corrupt", body_of() + b"\0" * 4),
        ("corrupt", altered(body_of(), data="0" * 64)),
        ("run", body_of("b")),
        ("run", altered(body_of(), run="6b" * 16)),
        ("run", altered(body_of(), round=ROUND + RUN.fragments)),
        ("run", altered(body_of(), format=2)),
        ("run", altered(body_of(), steps=-1)),
        ("run", altered(body_of(), steps=2**31 + 1)),
        ("run", altered(body_of(), step_seconds="fast")),
    ],
)
def test_each_refusal(reason: str, body: bytes) -> None:
    found = verdict(body)
    assert isinstance(found, Refusal) and (found.node, found.reason) == ("a", reason)


def test_a_snapshot_without_a_record_is_refused() -> None:
    body = bytes(encode_payload(RUN.layouts[0], codec_named("F32"), np.zeros(SIZE, np.float32), lambda _: {"x": "y"}))
    assert verdict(body) == Refusal("a", "", "", "run")


def test_a_snapshot_of_another_fragment_or_codec_is_refused() -> None:
    """As of another schema, if all of it is there, and by its name."""
    body = body_of()
    metadata = read_metadata(body)
    assert not isinstance(metadata, Malformed)
    named = digest(metadata[SNAPSHOT_METADATA])
    other, half = first_head(RUN, 1), run_of(replace(PLAIN, delta_codec="BF16"))
    for found in (judged(body, "a", ROUND + 1, other, RUN), verdict(body, run=half)):
        assert isinstance(found, Refusal) and (found.reason, found.snapshot) == ("schema", named)
    assert judged(body, "b", ROUND + 1, other, RUN) == Refusal("b", "", "", "schema")
    cut = judged(body[:-1], "a", ROUND + 1, other, RUN)
    assert isinstance(cut, Refusal) and (cut.reason, cut.snapshot) == ("corrupt", named)


def test_a_refused_snapshot_is_named_so_that_its_writer_learns_of_it() -> None:
    body = body_of(steps=0)
    metadata = read_metadata(body)
    assert not isinstance(metadata, Malformed)
    found = verdict(body)
    assert isinstance(found, Refusal)
    assert found.snapshot == digest(metadata[SNAPSHOT_METADATA])
    assert found.incarnation == json.loads(metadata[SNAPSHOT_METADATA])["incarnation"]


def test_tokens_are_clamped_to_what_the_run_allows_for_the_steps() -> None:
    run = run_of(replace(PLAIN, tokens_per_step_max=10))
    greedy = accepted(tokens=10**12, run=run)
    assert greedy.record.tokens == 200
    assert greedy.digest == digest(replace(greedy.record, tokens=10**12).encoded()), "the digest is its writer's"
    assert accepted(tokens=199, run=run).record.tokens == 199


@pytest.mark.parametrize(("clock", "counts"), [(30, 30), (110, 110), (140, 140), (141, 140), (2**53, 140)])
def test_a_clock_counts_as_far_as_its_steps_and_a_cycle_beyond_the_head_allow(clock: int, counts: int) -> None:
    found = judged(body_of(clock=clock), "a", ROUND, replace(HEAD, newest_step=100), RUN)
    assert isinstance(found, Accepted) and found.record.clock == counts


@given(st.binary(max_size=400))
@settings(deadline=None)
def test_any_bytes_are_refused(body: bytes) -> None:
    assert isinstance(verdict(body), Refusal)


BODY = body_of()


@given(st.integers(0, len(BODY) - 1), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_a_flipped_byte_is_never_an_exception_and_never_another_delta(place: int, flip: int) -> None:
    body = bytearray(BODY)
    body[place] ^= flip
    found = verdict(bytes(body))
    if isinstance(found, Accepted):
        assert found.norm == pytest.approx(0.5 * SIZE**0.5)
        assert (found.delta.read(0, SIZE, np.empty(SIZE, np.float32)) == 0.5).all()


@given(
    st.dictionaries(
        st.sampled_from(list(json.loads(accepted().record.encoded()))), st.none() | st.text() | st.integers()
    )
)
@settings(max_examples=100, deadline=None)
def test_any_record_in_the_metadata_is_judged(changes: dict[str, object]) -> None:
    assert isinstance(verdict(altered(BODY, **changes)), Accepted | Refusal)


@pytest.mark.parametrize("codec", ["F32", "F16", "BF16", "F8_E4M3", "F4", "INT8", "INT4", "INT2", "TOPK(64/4096,INT2)"])
def test_random_data_in_any_codec_never_raises(codec: str) -> None:
    run = run_of(replace(PLAIN, delta_codec=codec))
    layout, noise = run.layouts[0], np.random.default_rng(0)
    body = body_of(run=run, delta=noise.standard_normal(layout.size, np.float32))
    header = 8 + struct.unpack_from("<Q", body)[0]
    for _ in range(20):
        random = body[:header] + noise.bytes(len(body) - header)
        payload = parse_payload(random, layout, codec_named(codec))
        assert not isinstance(payload, Malformed)
        piece_squares(InMemory(codec_named(codec), payload.parts).read, layout)
        assert isinstance(verdict(random, run=run), Refusal)


# -- merging -----------------------------------------------------------------------------------------------


def test_the_outer_step_moves_the_parameters_by_the_weighted_mean() -> None:
    theta = np.full(SIZE, 10.0, np.float32)
    two = [accepted("a", 1.0, tokens=100), accepted("b", 2.0, tokens=200)]
    result = merger(RUN, HEAD, theta, OuterState(()), two)
    assert result is not None
    assert result.theta == pytest.approx(10.0 - (0.2 * 1.0 + 0.8 * 2.0))
    assert (theta == 10.0).all(), "inputs stay as they are"
    assert result.cosine == pytest.approx(1.0)
    assert result.outer == OuterState(())


def test_buffers_take_the_mean_whatever_the_outer_optimizer() -> None:
    run = run_of(replace(PLAIN, outer=Nesterov(lr=0.7, momentum=0.9, warmup=0.0)))
    layout = run.layouts[0]
    pieces = (replace(layout.pieces[0], role="buffer"), *layout.pieces[1:])
    run = replace(run, layouts=(replace(layout, pieces=pieces), *run.layouts[1:]))
    theta, momentum = np.full(SIZE, 10.0, np.float32), np.full(SIZE, 2.0, np.float32)
    two = [accepted("a", 1.0, tokens=100), accepted("b", 2.0, tokens=200)]
    result = merger(run, HEAD, theta, OuterState((momentum,)), two)
    assert result is not None
    count = pieces[0].elements
    assert result.theta[:count] == pytest.approx(10.0 - (0.2 * 1.0 + 0.8 * 2.0))
    assert (result.outer.arrays[0][:count] == 0.0).all()
    assert (result.theta[count:] < 7.5).all()


@pytest.mark.parametrize("codec", ["BF16", "F8_E4M3", "F4", "INT2", "TOPK(64/4096,INT2)"])
def test_buffers_stay_exact_where_deltas_are_lossy(codec: str) -> None:
    """A variance of 1000 falls to 0.1: its delta, rounded to bf16, would leave 0.0 or less of it."""
    run = run_of(replace(PLAIN, delta_codec=codec, outer=SGD(1.0)))
    layout = run.layouts[0]
    pieces = (replace(layout.pieces[0], role="buffer"), *layout.pieces[1:])
    run = replace(run, layouts=(replace(layout, pieces=pieces), *run.layouts[1:]))
    count, theta = pieces[0].elements, np.full(SIZE, 1000.0, np.float32)
    trained = accepted("b", run=run, base=theta, values=theta - np.float32(999.9))
    result = merger(run, first_head(run), theta, OuterState(()), [trained])
    assert result is not None
    assert result.theta[:count] == pytest.approx(0.1, abs=1e-4)
    assert not np.allclose(result.theta[count:], 0.1, atol=1e-3), "the others are rounded"


def test_buffers_stay_exact_where_commits_are_lossy() -> None:
    """A variance of 0.01 beside a weight that moves by 100: four bits for both would leave nothing of it."""
    run = run_of(replace(PLAIN, commit_codec="INT4", full_every=4))
    layout = run.layouts[0]
    pieces = (replace(layout.pieces[0], role="buffer"), *layout.pieces[1:])
    with_buffers = replace(run, layouts=(replace(layout, pieces=pieces), *run.layouts[1:]))
    count = pieces[0].elements
    theta, delta = np.full(SIZE, 0.02, np.float32), np.full(SIZE, 100.0, np.float32)
    delta[:count] = 0.01
    one = [accepted("a", delta)]
    plain, kept = (merger(each, HEAD, theta, OuterState(()), one) for each in (run, with_buffers))
    assert plain is not None and kept is not None
    assert plain.change is not None and kept.change is None, "it is committed whole"
    assert kept.theta[:count] == pytest.approx(0.01, rel=1e-6) and kept.outer.residual is None
    assert not np.allclose(plain.theta[:count], 0.01, rtol=0.5), "as a change it would be lost"


def test_outer_state_is_moved_and_not_shared() -> None:
    run = run_of(replace(PLAIN, outer=Nesterov(lr=1.0, momentum=0.5, warmup=0.0)))
    theta, momentum = np.zeros(SIZE, np.float32), np.full(SIZE, 2.0, np.float32)
    result = merger(run, first_head(run), theta, OuterState((momentum,)), [accepted("a", 1.0, run)])
    assert result is not None
    assert (result.outer.arrays[0] == 2.0).all() and (momentum == 2.0).all()
    assert result.outer.arrays[0] is not momentum
    assert result.theta == pytest.approx(-(1.0 + 0.5 * 2.0))


def test_a_round_reuses_the_memory_of_one_that_nobody_holds_and_of_no_other() -> None:
    run = run_of(replace(PLAIN, outer=Nesterov()))
    count = recycled.BYTES_LEAST // 4
    run = replace(run, layouts=(FragmentLayout(0, (Piece("w", (count,), 0),)), *run.layouts[1:]))
    one = replace(accepted("a"), delta=InMemory(codec_named("F32"), [np.ones(count, np.float32).view(np.uint8)]))
    one = replace(one, squares=(float(count),))
    theta, outer, held, places = np.zeros(count, np.float32), OuterState((np.zeros(count, np.float32),)), [], []
    for version in range(6):
        head = replace(first_head(run), version=version)
        result = merger(run, head, theta, outer, [one])
        assert result is not None
        theta, outer = result.theta, result.outer
        places.append({part.ctypes.data for part in (theta, *outer.arrays)})
        if version == 1:
            held = [(part, part.tobytes()) for part in (theta[7:], *outer.arrays)]
    kept = {part.ctypes.data - 4 * 7 * (part.size < count) for part, _ in held}
    assert all(part.tobytes() == before for part, before in held)
    assert all(not kept & later for later in places[2:])
    assert places[5] & (places[3] | places[2])


def test_equal_snapshots_give_equal_bytes_in_any_order() -> None:
    run = run_of(SETTINGS)
    noise = np.random.default_rng(1)
    many = [accepted(node, noise.standard_normal(SIZE).astype(np.float32), run) for node in "abcde"]
    theta, momentum = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)
    results = [
        merger(run, first_head(run), theta, OuterState((momentum,)), order)
        for order in (many, many[::-1], many[2:] + many[:2])
    ]
    first, *others = [
        (one.theta.tobytes(), one.outer.arrays[0].tobytes(), one.cosine) for one in results if one is not None
    ]
    assert len(others) == 2 and all(other == first for other in others)


@pytest.mark.parametrize("theta", [3e38, -3e38])
def test_a_result_that_is_not_finite_is_none(theta: float) -> None:
    with np.errstate(over="ignore"):
        found = merger(
            RUN, HEAD, np.full(SIZE, theta, np.float32), OuterState(()), [accepted("a", np.copysign(3e38, -theta))]
        )
    assert found is None


def test_an_outer_state_that_is_not_finite_is_none() -> None:
    run = run_of(replace(PLAIN, outer=Nesterov(lr=1e-6, momentum=0.9, warmup=0.0)))
    momentum = np.full(SIZE, 3e38, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        found = merger(
            run, first_head(run), np.zeros(SIZE, np.float32), OuterState((momentum,)), [accepted("a", 3e38, run)]
        )
    assert found is None


@pytest.mark.parametrize("outer", [SGD(), Nesterov(), Adam()])
def test_sections_come_back_as_they_were(outer: Any) -> None:
    run, names = run_of(replace(PLAIN, outer=outer)), outer.state_names()
    state = tuple(np.full(SIZE, 0.5 + index, np.float32) for index in range(len(names)))
    result = merger(run, first_head(run), np.ones(SIZE, np.float32), OuterState(state), [accepted("a", 1.0, run)])
    assert result is not None

    async def main(place: Place) -> None:
        host, layout = place.host(), RUN.layouts[0]
        state_layout = outer_layout(layout, names)
        sections = await put_sections(host, run, first_head(run), result, state_layout)
        assert [section.name for section in sections] == (["theta", "outer"] if names else ["theta"])
        theta = await get_section(host.mailbox, host.clock, sections[0], layout)
        assert not isinstance(theta, Rejected) and theta.tobytes() == result.theta.tobytes()
        if names:
            flat = await get_section(host.mailbox, host.clock, sections[1], state_layout)
            assert not isinstance(flat, Rejected)
            assert flat.tobytes() == b"".join(part.tobytes() for part in result.outer.arrays)

    virtually(main)


def test_the_layout_of_the_state_repeats_the_fragments_pieces() -> None:
    layout = outer_layout(RUN.layouts[0], ("mean", "square"))
    assert layout.size == 2 * SIZE
    assert len({piece.key for piece in layout.pieces}) == 2 * len(RUN.layouts[0].pieces)
    assert [piece.offset for piece in layout.pieces] == [
        sum(p.elements for p in layout.pieces[:i]) for i in range(len(layout.pieces))
    ]


# -- the record --------------------------------------------------------------------------------------------


def record_of(gathering: Gathering, *, newest_step: int = 0, merged_tokens: int = 0, **head: Any) -> RoundRecord:
    async def main(place: Place) -> RoundRecord:
        return round_record(
            place.host("a"),
            RUN,
            replace(HEAD, merged_tokens=merged_tokens, **head),
            gathering=gathering,
            sections=HEAD.sections,
            estimates=Estimates(step=0.1),
            cosine=0.5,
            newest_step=newest_step,
            closer="b",
        )

    return virtually(main)


def readable(record: RoundRecord) -> bool:
    return parse_round(record.encoded(), RUN.id, record.round) == record


def gathering_of(snapshots: Sequence[Accepted] = (), refused: Sequence[Refusal] = ()) -> Gathering:
    return Gathering(accepted=tuple(snapshots), refused=tuple(refused))


def test_a_record_says_who_took_part_and_who_did_not() -> None:
    stale = verdict(body_of("c", record="9" * 64), "c")
    assert isinstance(stale, Refusal)
    two = [accepted("b", tokens=100), accepted("a", tokens=300)]
    record = record_of(gathering_of(two, [stale]), merged_tokens=1000)
    assert [(one.node, one.tokens) for one in record.participants] == [("a", 300), ("b", 100)]
    assert [one.weight for one in record.participants] == pytest.approx([0.9, 0.1])
    assert record.participants[1].snapshot == two[0].digest
    assert record.refusals == (stale,)
    assert record.merged_tokens == 1400
    assert (record.prev, record.round, record.node, record.closer) == (HEAD.digest, ROUND, "a", "b")
    assert readable(record) and not record.void


def test_a_void_record_names_the_sections_it_found() -> None:
    record = record_of(gathering_of(), merged_tokens=7)
    assert record.void and record.sections == HEAD.sections and record.merged_tokens == 7
    assert readable(record)


@pytest.mark.parametrize(
    ("newest", "step", "next_step"),
    [(0, 10, 30), (10, 10, 30), (29, 10, 30), (30, 10, 50), (31, 10, 50), (1007, 10, 1010)],
)
def test_missed_cycles_are_passed_over(newest: int, step: int, next_step: int) -> None:
    record = record_of(gathering_of(), newest_step=newest)
    assert (record.step, record.next_step) == (step, next_step)
    assert record.newest_step == max(newest, step)
    assert is_due(record.next_step, 0, RUN.fragments, RUN.settings.sync_every)


def test_two_attempts_never_have_the_same_bytes() -> None:
    async def main(place: Place) -> set[str]:
        host = place.host()
        return {host.nonce() for _ in range(100)}

    assert len(virtually(main)) == 100


def test_absurd_token_counts_do_not_make_a_record_unreadable() -> None:
    greedy = replace(accepted(), record=replace(accepted().record, tokens=COUNT_MAX, steps=2**31))
    assert readable(record_of(gathering_of([greedy]), merged_tokens=COUNT_MAX))


def test_a_flood_of_refusals_does_not_make_a_record_unreadable() -> None:
    flood = [Refusal(f"{number:064d}", "f" * 64, "4" * 64, "corrupt") for number in range(20_000)]
    record = record_of(gathering_of([accepted()], flood))
    assert readable(record)
    assert 100 <= len(record.refusals) < len(flood)


def test_snapshot_records_carry_everything_that_judging_needs() -> None:
    assert set(json.loads(accepted().record.encoded())) == set(SnapshotRecord.__slots__)


# -- compressed and spooled --------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["F32", "BF16", "INT4"])
def test_a_compressed_snapshot_is_judged_like_a_plain_one(codec: str) -> None:
    run = run_of(replace(PLAIN, delta_codec=codec))
    plain = body_of(run=run, delta=0.5)
    packed = compress(plain, element_bytes(codec_named(codec)))
    one, other = verdict(plain, run=run), verdict(bytes(packed), run=run)
    assert isinstance(one, Accepted) and isinstance(other, Accepted)
    assert (one.digest, one.norm, one.squares) == (other.digest, other.norm, other.squares)
    assert isinstance(verdict(bytes(packed)[:-2], run=run), Refusal)


def test_a_compressed_bomb_is_refused() -> None:
    bomb = compress(bytes(2**26), 4)
    assert len(bomb) < 2**20
    assert verdict(bytes(bomb)) == Refusal("a", "", "", "corrupt")


def test_a_full_disk_keeps_contributions_in_memory_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(prefix: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    spool = Spool(0)
    accepted = [judged(body_of(node), node, ROUND, HEAD, RUN, spool) for node in "bcd"]
    assert all(isinstance(each, Accepted) for each in accepted) and spool.spooled == 0
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "merge_memory" in said[0] and "No space left" in said[0] and "TMPDIR" in said[0]


def test_spooled_contributions_merge_to_the_same_bytes() -> None:
    noise = np.random.default_rng(3)
    bodies = {node: body_of(node, noise.standard_normal(SIZE).astype(np.float32), RUN) for node in "abc"}
    results = []
    for budget in (None, 0, 4 * SIZE):
        spool = None if budget is None else Spool(budget)
        accepted = [judged(body, node, ROUND, HEAD, RUN, spool) for node, body in bodies.items()]
        assert all(isinstance(one, Accepted) for one in accepted)
        assert spool is None or spool.spooled == 3 * 4 * SIZE - (budget or 0)
        result = merger(RUN, HEAD, np.zeros(SIZE, np.float32), OuterState(()), accepted)  # type: ignore[arg-type]  # all are accepted
        assert result is not None
        results.append(result.theta.tobytes())
    assert results[0] == results[1] == results[2]


def test_squares_that_were_known_before_change_no_bit_of_a_merge() -> None:
    run = run_of(SETTINGS)
    noise = np.random.default_rng(1)
    many = [accepted(node, noise.standard_normal(SIZE).astype(np.float32), run) for node in "abc"]
    for one in many:
        fresh = piece_squares(one.delta.read, run.layouts[0])
        assert one.squares == tuple(fresh.tolist()) and one.norm == norm_of(fresh)
