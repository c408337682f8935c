"""Keys and records of gossip rounds."""

import json
from dataclasses import replace

import pytest

from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.gossip import (
    METADATA,
    Blob,
    MeanKey,
    MeanRecord,
    Member,
    RosterKey,
    RosterRecord,
    ShareKey,
    ShareRecord,
    parse_gossip,
    parse_mean,
    parse_roster,
    parse_share,
)
from gradientmail_core.protocol.keys import blob_key

RUN = "5a" * 16
SHA = "3" * 64
BLOB = Blob(blob_key(4, "a", SHA), SHA, "F32")
ROSTER = RosterRecord(
    RUN, 4, "a", "0f", "0e", (Member("a", "0a"), Member("b", "0b", True)), ("a", "b"), True, False, 0.5, None
)
MEAN = MeanRecord(RUN, 4, 1, "a", "0f", ("a", "b"), SHA, replace(BLOB, codec="BF16"), "4" * 64, 0.25, 64)
KEY = ShareKey(4, "start", 1, "a")
SHARE = ShareRecord(RUN, 4, "start", 1, "a", "0a", SHA, 3, SHA, "BF16", 20, 160)

KEYS = [
    RosterKey(7),
    MeanKey(7, 2),
    MeanKey(7, 2, full=True),
    ShareKey(7, "start", 2, "node-1", 3),
    ShareKey(7, "grad", 0, "a.b"),
    ShareKey(7, "mix2", 12, "a-1-001-b"),
    ShareKey(7, "probe", 0, "start-0-000-x"),
]


@pytest.mark.parametrize("key", KEYS)
def test_keys_come_back_from_their_paths(key):
    assert parse_gossip(key.path) == key


@pytest.mark.parametrize(
    "path",
    [
        "live/gossip/0000000007/roster-2",
        "live/gossip/7/roster",
        "live/gossip/0000000007/start-0-002-Node",
        "live/gossip/0000000007/mix1-2",
        "live/deltas/0000000007/a",
        "live/gossip/0000000007/start-0-002-",
    ],
)
def test_strangers_keys_mean_nothing(path):
    assert parse_gossip(path) is None


def test_records_come_back_from_their_bytes():
    assert parse_roster(ROSTER.encoded(), RUN, 4, 2) == ROSTER
    assert parse_mean(MEAN.encoded(), RUN, MeanKey(4, 1)) == MEAN
    assert parse_share({METADATA: SHARE.encoded()}, RUN, KEY, "0a") == SHARE
    full = replace(MEAN, base=None, payload=BLOB)
    assert parse_mean(full.encoded(), RUN, MeanKey(4, 1, full=True)) == full
    assert isinstance(parse_mean(full.encoded(), RUN, MeanKey(4, 1)), Rejected)
    assert isinstance(parse_mean(MEAN.encoded(), RUN, MeanKey(4, 1, full=True)), Rejected)


def test_only_members_that_are_heard_of_are_active():
    assert ROSTER.active == ("a",)


@pytest.mark.parametrize(
    "change",
    [
        {"round": 5},
        {"run": "5b" * 16},
        {"averagers": ["a"]},
        {"averagers": ["a", "B!"]},
        {"members": [["a"]]},
        {"seed": "zz"},
        {"mean": 1},
        {"l2": "far"},
        {"format": 2},
        {"members": [{"node": "a", "incarnation": "0a", "silent": False}] * 2},
    ],
)
def test_rosters_that_are_none_are_refused(change):
    body = json.dumps({**json.loads(ROSTER.encoded()), **change}).encode()
    assert isinstance(parse_roster(body, RUN, 4, 2), Rejected)


@pytest.mark.parametrize(
    "change",
    [
        {"fragment": 0},
        {"payload": {"key": "manifest.json", "sha256": SHA, "codec": "F32"}},
        {"base": "x"},
        {"spread": float("inf")},
        {"base": None},
        {"name": "x"},
        {"tokens": -1},
    ],
)
def test_means_that_are_none_are_refused(change):
    body = json.dumps({**json.loads(MEAN.encoded()), **change}).encode()
    assert isinstance(parse_mean(body, RUN, MeanKey(4, 1)), Rejected)


@pytest.mark.parametrize(
    ("key", "incarnation"),
    [
        (replace(KEY, round=5), "0a"),
        (replace(KEY, kind="grad"), "0a"),
        (replace(KEY, node="b"), "0a"),
        (replace(KEY, fragment=0), "0a"),
        (KEY, "0b"),
    ],
)
def test_a_share_counts_under_its_own_key_only(key, incarnation):
    assert isinstance(parse_share({METADATA: SHARE.encoded()}, RUN, key, incarnation), Rejected)


@pytest.mark.parametrize("metadata", [{}, {METADATA: "{"}, {METADATA: "[]"}])
def test_a_share_without_a_record_is_refused(metadata):
    assert isinstance(parse_share(metadata, RUN, KEY, None), Rejected)


@pytest.mark.parametrize("body", [b"", b"not a record", b"{}", b"[" * 100])
def test_garbage_is_a_value(body):
    assert isinstance(parse_roster(body, RUN, 4, 2), Rejected)
    assert isinstance(parse_mean(body, RUN, MeanKey(4, 1)), Rejected)
