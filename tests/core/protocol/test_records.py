"""Records: canonical bytes come back as they were, and any other content is refused with a reason."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradientmail_core.mailbox.base import is_key
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.records import (
    MANIFEST_LONGEST,
    RECORD_LONGEST,
    Claim,
    Manifest,
    RoundRecord,
    Section,
    SnapshotRecord,
    digest,
    parse_claim,
    parse_manifest,
    parse_round,
    parse_snapshot,
)
from tests.core.protocol.records import (
    CLAIM,
    CLAIMS,
    MANIFEST,
    MANIFESTS,
    OTHER_RUN,
    ROUND,
    ROUNDS,
    RUN,
    SNAPSHOT,
    SNAPSHOTS,
)

Record = Manifest | RoundRecord | SnapshotRecord | Claim
Parse = Callable[[bytes], Record | Rejected]

PARSERS: dict[str, Parse] = {
    "manifest": parse_manifest,
    "round": lambda body: parse_round(body, RUN, 7),
    "snapshot": lambda body: parse_snapshot(body.decode(errors="replace"), RUN),
    "claim": lambda body: parse_claim(body, RUN),
    "creation claim": lambda body: parse_claim(body, None),
}
EXAMPLES: dict[str, Record] = {
    "manifest": MANIFEST, "round": ROUND, "snapshot": SNAPSHOT, "claim": CLAIM, "creation claim": CLAIM,
}  # fmt: skip
STRANGE: list[object] = [
    None, True, -1, 0, 2**63, 10**400, 1.5, 1e308, -1e308, "", "x", "\ud800", "../../manifest.json", "a" * 5000,
    [], [[]], [None], {}, {"": None}, [0] * 5000, ["a", 1], [["t0", -1, -1]], [["t0", [4, 2], "matrix"]],
]  # fmt: skip
ANY_JSON = st.recursive(
    st.sampled_from(STRANGE) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(sorted(PARSERS))


def encoded(record: Record) -> bytes:
    body = record.encoded()
    return body.encode() if isinstance(body, str) else body


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in inner for place in places(child, (*path, key)))]


def changed(body: bytes, path: tuple[Any, ...], value: object) -> bytes:
    """The body with the value at ``path`` replaced."""
    if not path:
        return json.dumps(value).encode()
    raw = place = json.loads(body)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(raw).encode()


def check_sound(kind: str, body: bytes) -> None:
    """Parsing gives a reason, or a value that can be written again and read back the same."""
    found = PARSERS[kind](body)
    if isinstance(found, Rejected):
        assert found.reason
    else:
        again = encoded(found)
        assert PARSERS[kind](again) == found
        assert all(is_key(section.key) for section in sections(found))


def sections(record: Record) -> tuple[Section, ...]:
    match record:
        case Manifest():
            return record.theta
        case RoundRecord():
            return record.sections
        case _:
            return ()


@given(ROUNDS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rounds_come_back(record: RoundRecord) -> None:
    assert parse_round(record.encoded(), RUN, 7) == record


@given(SNAPSHOTS)
@settings(deadline=None)
def test_snapshots_come_back(record: SnapshotRecord) -> None:
    assert parse_snapshot(record.encoded(), RUN) == record


@given(CLAIMS)
@settings(deadline=None)
def test_claims_come_back(record: Claim) -> None:
    assert parse_claim(record.encoded(), RUN) == record
    assert parse_claim(record.encoded(), None) == record


@given(MANIFESTS)
@settings(deadline=None)
def test_manifests_come_back(record: Manifest) -> None:
    assert parse_manifest(record.encoded()) == record


@pytest.mark.parametrize("kind", PARSERS)
def test_canonical_bytes_are_one_spelling(kind: str) -> None:
    body = encoded(EXAMPLES[kind])
    raw = json.loads(body)
    assert json.dumps(raw, sort_keys=True, separators=(",", ":")).encode() == body
    assert list(raw) == sorted(raw)


@given(KINDS, st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_give_a_reason(kind: str, body: bytes) -> None:
    assert isinstance(PARSERS[kind](body), Rejected)


@given(KINDS, ANY_JSON)
@settings(deadline=None)
def test_any_json_gives_a_reason(kind: str, value: object) -> None:
    assert isinstance(PARSERS[kind](json.dumps(value).encode()), Rejected)


@given(KINDS, ANY_JSON, st.data())
@settings(max_examples=400, deadline=None)
def test_any_change_of_a_record_is_read_soundly(kind: str, value: object, data: st.DataObject) -> None:
    body = encoded(EXAMPLES[kind])
    path = data.draw(st.sampled_from(places(json.loads(body))))
    check_sound(kind, changed(body, path, value))


@pytest.mark.parametrize("kind", PARSERS)
def test_every_field_is_read_soundly_whatever_it_holds(kind: str) -> None:
    body = encoded(EXAMPLES[kind])
    for path in places(json.loads(body)):
        for value in STRANGE:
            check_sound(kind, changed(body, path, value))


@pytest.mark.parametrize("kind", PARSERS)
def test_a_record_cut_short_is_refused(kind: str) -> None:
    body = encoded(EXAMPLES[kind])
    assert all(isinstance(PARSERS[kind](body[:length]), Rejected) for length in range(len(body)))


@pytest.mark.parametrize("kind", PARSERS)
def test_every_field_is_asked_for(kind: str) -> None:
    raw = json.loads(encoded(EXAMPLES[kind]))
    for name in raw:
        body = json.dumps({key: value for key, value in raw.items() if key != name}).encode()
        assert PARSERS[kind](body) == Rejected(f"{name} is missing"), name


@pytest.mark.parametrize("kind", ["round", "snapshot", "claim"])
def test_records_of_another_run_are_refused(kind: str) -> None:
    body = changed(encoded(EXAMPLES[kind]), ("run",), OTHER_RUN)
    assert PARSERS[kind](body) == Rejected("of another run")


def test_a_claim_to_create_may_name_any_run() -> None:
    found = parse_claim(changed(encoded(CLAIM), ("run",), OTHER_RUN), None)
    assert isinstance(found, Claim) and found.run == OTHER_RUN


@pytest.mark.parametrize("kind", PARSERS)
def test_another_format_is_refused_by_its_number(kind: str) -> None:
    found = PARSERS[kind](changed(encoded(EXAMPLES[kind]), ("format",), 2))
    assert found == Rejected("format 2, this library reads 1")


def test_a_round_stands_only_under_its_own_number() -> None:
    assert parse_round(ROUND.encoded(), RUN, 8) == Rejected("of round 7")


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("next_step",), 20, "the next step does not lie ahead"),
        (("sections",), [], "no parameters are named"),
        (("sections", 0, "name"), "momentum", "no section is called 'momentum'"),
        (("sections", 0, "key"), "live/deltas/0000000007/a", "a section's key is no payload's"),
        (("sections", 0, "key"), "blobs/../manifest.json", "a section's key is no payload's"),
        (
            ("sections", 0, "key"),
            "blobs/0000000007/a b-" + "2" * 64 + ".safetensors",
            "a section's key is no payload's",
        ),
        (("participants", 0, "weight"), 1.5, "a weight lies outside 0 to 1"),
        (("participants", 0, "weight"), -0.5, "a weight lies outside 0 to 1"),
        (("refusals", 0, "reason"), "ugly", "no refusal is called 'ugly'"),
        (("estimates",), [], "estimates is not an object"),
        (("participants",), [0], "participants[0] is not an object"),
    ],
)
def test_a_round_that_makes_no_sense_is_refused(path: tuple[Any, ...], value: object, reason: str) -> None:
    assert parse_round(changed(ROUND.encoded(), path, value), RUN, 7) == Rejected(reason)


def test_negative_times_count_as_none() -> None:
    found = parse_round(changed(ROUND.encoded(), ("estimates", "sync"), -3.0), RUN, 7)
    assert isinstance(found, RoundRecord) and found.estimates.sync == 0.0


def test_times_are_bounded_so_that_sums_of_them_stay_finite() -> None:
    snapshot = parse_snapshot(changed(encoded(SNAPSHOT), ("step_seconds",), 1e308).decode(), RUN)
    assert isinstance(snapshot, SnapshotRecord) and snapshot.step_seconds * 1e12 < 1e300
    round = parse_round(changed(ROUND.encoded(), ("estimates", "quorum"), 1e308), RUN, 7)
    assert isinstance(round, RoundRecord) and round.estimates.quorum * 1e12 < 1e300


def test_a_void_round_is_one_without_participants() -> None:
    found = parse_round(changed(ROUND.encoded(), ("participants",), []), RUN, 7)
    assert isinstance(found, RoundRecord) and found.void and not ROUND.void


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("store",), "fast"),
        (("plan",), []),
        (("closers",), ["a", "b"]),
        (("closers",), [["a"]]),
        (("theta",), []),
        (("schema", 0), ["t0", [4, -2], "matrix"]),
        (("schema", 0), ["t0", [4, True], "matrix"]),
        (("schema", 0), ["t0", [1] * 65, "matrix"]),
        (("schema", 0), ["t0", [4, 2], "king"]),
        (("schema", 0), ["t" * 513, [4, 2], "matrix"]),
        (("plan", 0), []),
        (("plan", 0, 0), ["t0", 3, 2]),
        (("plan", 0, 0), ["t0", -2, 2]),
        (("plan", 0, 0), ["t0", 0, 1, 2]),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(path: tuple[Any, ...], value: object) -> None:
    assert isinstance(parse_manifest(changed(MANIFEST.encoded(), path, value)), Rejected)


@pytest.mark.parametrize(("kind", "longest"), [("round", RECORD_LONGEST), ("manifest", MANIFEST_LONGEST)])
def test_too_long_is_refused_unread(kind: str, longest: int) -> None:
    body = encoded(EXAMPLES[kind])
    assert not isinstance(PARSERS[kind](body + b" " * (longest - len(body))), Rejected)
    assert PARSERS[kind](body + b" " * (longest - len(body) + 1)) == Rejected(f"longer than {longest} bytes")


def test_identity_is_the_sha256_of_the_bytes() -> None:
    assert digest(b"abc") == digest("abc") == digest(bytearray(b"abc")) == digest(memoryview(b"abc"))
    assert digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
