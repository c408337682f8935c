"""A key says one thing: what is built is parsed back, and what is not spelled that way is a stranger's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox.base import is_key
from gradientmail_core.protocol.keys import (
    MANIFEST,
    ClaimKey,
    DeltaKey,
    HeadKey,
    LeaseKey,
    LiveKey,
    blob_key,
    blob_prefix,
    checked_node,
    creation_key,
    is_blob_key,
    parse_live,
    tape_key,
)

NODES = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?", fullmatch=True)
ROUNDS = st.integers(0, 10**10 - 1)
LEASES = st.builds(
    LeaseKey,
    node=NODES,
    beat=ROUNDS,
    state=st.sampled_from(["j", "t", "w", "e", "s", "d", "x"]),
    step=st.integers(0, 10**15 - 1),
    tag=st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
)
LIVE: st.SearchStrategy[LiveKey] = (
    LEASES
    | st.builds(HeadKey, st.integers(0, 999), ROUNDS)
    | st.builds(ClaimKey, ROUNDS, st.integers(0, 999))
    | st.builds(DeltaKey, ROUNDS, NODES)
)
PLAUSIBLE = st.from_regex(
    r"live/(leases|heads|claims|deltas)/[a-z0-9٠-٣_.]{1,12}/[0-9٠-٣]{1,11}(-[tx]\d{0,3}-[0-9a-f]{16})?"
)


@given(LIVE)
@settings(deadline=None)
def test_live_keys_come_back(key: LiveKey) -> None:
    assert parse_live(key.path) == key
    assert is_key(key.path)


@given(st.text(max_size=60) | PLAUSIBLE)
@settings(deadline=None)
def test_any_other_spelling_is_a_stranger(text: str) -> None:
    key = parse_live(text)
    assert key is None or key.path == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "live/",
        "live/heads/000/0000000001\n",
        "live/heads/٠٠٠/0000000001",
        "live/heads/00/0000000001",
        "live/heads/000/00000000001",
        "live/claims/0000000001/1",
        "live/deltas/0000000001/Node",
        "live/deltas/0000000001/../x",
        "live/deltas/0000000001/.hidden",
        "live/deltas/0000000001/" + "n" * 65,
        "live/leases/a/0000000001-q5-" + "0" * 16,
        "live/leases/a/0000000001-t-" + "0" * 16,
        "live/leases/a/0000000001-t05-" + "0" * 16,
        "live/leases/a/0000000001-t-5-" + "0" * 16,
        "live/leases/a/0000000001-t5-" + "0" * 15,
        "live/leases/a/b/0000000001-t5-" + "0" * 16,
    ],
)
def test_near_misses_are_strangers(text: str) -> None:
    assert parse_live(text) is None


@given(ROUNDS, ROUNDS)
@settings(deadline=None)
def test_keys_sort_as_numbers_do(one: int, other: int) -> None:
    assert (tape_key(one, 0) < tape_key(other, 0)) == (one < other)
    assert (blob_prefix(one) < blob_prefix(other)) == (one < other)
    assert (DeltaKey(one, "a").path < DeltaKey(other, "a").path) == (one < other)


def test_the_tape_has_ten_thousand_rounds_to_a_directory() -> None:
    assert tape_key(9_999, 0) == "tape/000000/0000009999-0"
    assert tape_key(10_000, 3) == "tape/000001/0000010000-3"


@given(ROUNDS, NODES, st.integers(0, 999))
@settings(deadline=None)
def test_every_key_is_one_that_mailboxes_take(round: int, node: str, number: int) -> None:
    keys = (MANIFEST, creation_key(number), tape_key(round, number), blob_key(round, node, "0" * 64))
    assert all(map(is_key, keys))
    assert blob_key(round, node, "0" * 64).startswith(blob_prefix(round))
    assert is_blob_key(blob_key(round, node, "0" * 64))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "manifest.json",
        "blobs/0000000001",
        "blobs/0000000001/a.safetensors",
        "blobs/1/a-" + "0" * 64 + ".safetensors",
        "blobs/0000000001/../a-" + "0" * 64 + ".safetensors",
        "blobs/0000000001/A-" + "0" * 64 + ".safetensors",
        "blobs/0000000001/a-" + "0" * 64 + ".safetensors\n",
        "live/deltas/0000000001/a",
    ],
)
def test_other_keys_are_no_payloads(key: str) -> None:
    assert not is_blob_key(key)


@given(NODES)
@settings(deadline=None)
def test_node_ids_that_fit_are_taken(node: str) -> None:
    assert checked_node(node) == node


@pytest.mark.parametrize("node", ["", "A", "a/b", "-a", "a-", ".a", "a.", "a b", "a\n", "ä", "n" * 65, "..", "٣"])
def test_node_ids_that_do_not_fit_are_explained(node: str) -> None:
    with pytest.raises(ConfigurationError, match="lower-case letters"):
        checked_node(node)
