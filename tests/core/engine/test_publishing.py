"""A snapshot is one object: the delta as its payload, and the record that describes it in its own metadata."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.engine.closing import SNAPSHOT_METADATA, judged
from gradientmail_core.engine.gathering import Accepted
from gradientmail_core.engine.learner import Snapshot
from gradientmail_core.engine.publishing import Published, encoded_snapshot
from gradientmail_core.protocol.records import SnapshotRecord, digest, parse_snapshot
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.error_feedback import Feedback, Residual
from gradientmail_core.tensors.payload import Malformed, parse_payload, read_metadata
from tests.core.engine.parts import SETTINGS, Place, first_head, run_of, virtually

RUN = run_of()
HEAD = first_head(RUN)
LAYOUT = RUN.layouts[0]


def taken(**changes: Any) -> Snapshot:
    base, trained = np.full(LAYOUT.size, 2.0, np.float32), np.full(LAYOUT.size, 1.25, np.float32)
    snapshot = Snapshot(
        fragment=0, version=0, record=HEAD.digest, base=base, values=trained, steps=10, tokens=80, local_step=12,
        step_seconds=0.25, early=True, clock=15,
    )  # fmt: skip
    return replace(snapshot, **changes)


def published(snapshot: Snapshot, run: Any = RUN, feedback: Feedback | None = None) -> Published:
    async def main(place: Place) -> Published:
        return encoded_snapshot(place.host("n1"), run, snapshot, 2, run.layouts[0], feedback)

    return virtually(main)


def record_in(body: bytes | bytearray) -> SnapshotRecord:
    metadata = read_metadata(body)
    assert not isinstance(metadata, Malformed)
    record = parse_snapshot(metadata[SNAPSHOT_METADATA], RUN.id)
    assert isinstance(record, SnapshotRecord)
    return record


def test_the_payload_is_base_minus_trained_and_the_base_stays() -> None:
    snapshot = taken()
    payload = parse_payload(published(snapshot).body, LAYOUT, codec_named("F32"))
    assert not isinstance(payload, Malformed)
    assert (payload.parts[0].view("<f4") == 0.75).all()
    assert (snapshot.base == 2.0).all()
    assert (snapshot.values == 0.75).all(), "the buffer is used for the delta"


def test_the_record_says_what_was_trained_from_what() -> None:
    record = record_in(published(taken()).body)
    assert (record.run, record.round, record.node, record.base) == (RUN.id, 2, "n1", HEAD.digest)
    assert (record.steps, record.tokens, record.local_step, record.clock) == (10, 80, 12, 15)
    assert (record.step_seconds, record.early, record.codec) == (0.25, True, "F32")


def test_its_identity_is_that_of_the_record_it_carries() -> None:
    found = published(taken())
    assert found.round == 2
    assert found.digest == digest(record_in(found.body).encoded())


def test_the_record_names_the_digest_of_its_data() -> None:
    found = published(taken())
    payload = parse_payload(found.body, LAYOUT, codec_named("F32"))
    assert not isinstance(payload, Malformed)
    assert record_in(found.body).data == payload.sha256


@pytest.mark.parametrize("codec", ["F32", "BF16", "INT8", "TOPK(64/4096,INT2)"])
def test_a_closer_accepts_what_is_published(codec: str) -> None:
    run = run_of(replace(SETTINGS, delta_codec=codec.lower()))
    found = published(taken(record=run.digest), run)
    verdict = judged(found.body, "n1", 2, first_head(run), run)
    assert isinstance(verdict, Accepted) and verdict.digest == found.digest
    assert verdict.record.codec == codec


def test_two_snapshots_of_equal_values_differ_by_their_counters_only() -> None:
    one, other = published(taken()), published(taken(tokens=81))
    assert one.digest != other.digest
    assert record_in(one.body).data == record_in(other.body).data


def test_what_the_codec_left_out_is_added_to_the_next_delta_with_its_decay() -> None:
    run = run_of(replace(SETTINGS, delta_codec="INT2", error_feedback=0.5))
    codec, delta = codec_named("INT2"), np.linspace(-1.0, 1.0, LAYOUT.size, dtype=np.float32)
    sent, feedback = [], Feedback("INT2")
    for _ in range(2):
        found = published(taken(record=run.digest, values=2.0 - delta), run, feedback)
        payload = parse_payload(found.body, LAYOUT, codec)
        assert not isinstance(payload, Malformed) and found.residual is not None
        sent.append(np.empty(LAYOUT.size, np.float32))
        codec.decode(payload.parts, 0, LAYOUT.size, sent[-1])
        feedback = Feedback("INT2", found.residual)
    left_out = delta - sent[0]
    assert np.abs(left_out).max() > 0.05
    assert found.residual is not None and found.residual.values is not None
    np.testing.assert_allclose(found.residual.values, delta + 0.5 * left_out - sent[1], atol=1e-6)
    other = published(taken(record=run.digest, values=2.0 - delta), run, Feedback("INT4", feedback.settled))
    assert other.residual is not None and np.allclose(other.residual.values, left_out), "another codec's is not used"  # type: ignore[arg-type]  # a residual has values


def test_without_error_feedback_nothing_is_kept() -> None:
    assert published(taken()).residual is None
    assert Residual().values is None
