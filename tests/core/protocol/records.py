"""Well-formed records, and strategies for any of them."""

from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st

from gradientmail_core.protocol.fields import COUNT_MAX
from gradientmail_core.protocol.keys import blob_key
from gradientmail_core.protocol.records import (
    Claim,
    Estimates,
    Manifest,
    Participant,
    Reason,
    Refusal,
    RoundRecord,
    Section,
    Share,
    SnapshotRecord,
)

RUN = "5a" * 16
OTHER_RUN = "6b" * 16

HEXES = st.integers(0, 2**64 - 1).map("{:x}".format)
DIGESTS = st.integers(0, 2**256 - 1).map("{:064x}".format)
NODES = st.sampled_from(["a", "b-1", "gpu.7", "n" * 64])
COUNTS = st.integers(0, COUNT_MAX)
SECONDS = st.floats(0, 1000)

SECTIONS = st.builds(
    lambda name, round, node, sha256: Section(name, blob_key(round, node, sha256), sha256, "F32"),
    st.sampled_from(["theta", "outer"]),
    st.integers(0, 10**9),
    NODES,
    DIGESTS,
)
PARTICIPANTS = st.builds(
    Participant, NODES, HEXES, DIGESTS, st.integers(0, 10**6), st.integers(0, 10**9), st.floats(0, 1)
)
REFUSALS = st.builds(Refusal, NODES, HEXES | st.just(""), DIGESTS | st.just(""), st.sampled_from(get_args(Reason)))
ROUNDS = st.builds(
    lambda record, ahead, sections: replace(record, next_step=record.step + ahead, sections=tuple(sections)),
    st.builds(
        RoundRecord,
        run=st.just(RUN),
        round=st.just(7),
        node=NODES,
        nonce=HEXES,
        prev=DIGESTS,
        step=st.integers(0, 10**12),
        next_step=st.just(0),
        newest_step=st.integers(0, 10**12),
        closer=NODES,
        sections=st.just(()),
        participants=st.lists(PARTICIPANTS, max_size=3).map(tuple),
        refusals=st.lists(REFUSALS, max_size=3).map(tuple),
        estimates=st.builds(Estimates, SECONDS, SECONDS, SECONDS, SECONDS, st.floats(0, 1e30)),
        cosine=st.none() | st.floats(-1, 1),
        merged_tokens=COUNTS,
        final=st.booleans(),
        shares=st.lists(st.builds(Share, NODES, st.integers(1, 10**6), st.floats(0, 1e9)), max_size=3).map(tuple),
    ),
    st.integers(1, 1000),
    st.lists(SECTIONS, min_size=1, max_size=3).filter(lambda found: any(one.name == "theta" for one in found)),
)
SNAPSHOTS = st.builds(
    SnapshotRecord,
    run=st.just(RUN),
    round=st.integers(0, 10**9),
    node=NODES,
    incarnation=HEXES,
    base=DIGESTS,
    data=DIGESTS,
    codec=st.sampled_from(["F32", "BF16", "TOPK(64/4096,INT2)"]),
    steps=st.integers(0, 2**31),
    tokens=COUNTS,
    local_step=COUNTS,
    step_seconds=SECONDS,
    early=st.booleans(),
    final=st.booleans(),
    age=st.integers(0, 5000),
    clock=COUNTS,
)
CLAIMS = st.builds(Claim, run=st.just(RUN), node=NODES, incarnation=HEXES, nonce=HEXES)
MANIFESTS = st.builds(
    lambda count, **fields: Manifest(
        run=RUN,
        schema=tuple((f"t{number}", (4, 2), "matrix") for number in range(count)),
        plan=tuple(((f"t{number}", -1, -1),) for number in range(count)),
        closers=tuple("a" for _ in range(count)),
        theta=tuple(Section("theta", blob_key(n, "a", "0" * 64), "0" * 64, "F32") for n in range(count)),
        **fields,
    ),
    st.integers(1, 4),
    node=NODES,
    nonce=HEXES,
    algorithm=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=3),
    store=st.sampled_from(["atomic", "racy", "none"]),
    frozen=st.none() | DIGESTS,
)

ROUND = RoundRecord(
    run=RUN,
    round=7,
    node="a",
    nonce="0f",
    prev="1" * 64,
    step=20,
    next_step=40,
    newest_step=21,
    closer="b",
    sections=(Section("theta", blob_key(7, "a", "2" * 64), "2" * 64, "F32"),),
    participants=(Participant("a", "0a", "3" * 64, 20, 160, 1.0),),
    refusals=(Refusal("b", "0b", "4" * 64, "stale"),),
    estimates=Estimates(0.1, 0.2, 0.3, 0.4, 0.5),
    cosine=0.25,
    merged_tokens=160,
)
SNAPSHOT = SnapshotRecord(
    run=RUN, round=7, node="a", incarnation="0a", base="1" * 64, data="2" * 64, codec="BF16", steps=20, tokens=160,
    local_step=20, step_seconds=0.1,
)  # fmt: skip
CLAIM = Claim(RUN, "a", "0a", "0f")
MANIFEST = Manifest(
    run=RUN,
    node="a",
    nonce="0f",
    schema=(("t0", (4, 2), "matrix"),),
    plan=((("t0", -1, -1),),),
    algorithm={"name": "diloco"},
    store="atomic",
    closers=("a",),
    frozen=None,
    theta=(Section("theta", blob_key(0, "a", "2" * 64), "2" * 64, "F32"),),
)
