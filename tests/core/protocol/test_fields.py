"""Whatever bytes a stranger writes, reading them gives a value of the right type or a reason, never an exception."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.protocol.fields import (
    COUNT_MAX,
    HEX,
    SHA256,
    FieldRefused,
    Fields,
    Rejected,
    canonical_json,
    guarded,
    parse_object,
)

LONGEST = 10_000

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)

READERS: dict[str, Callable[[Fields], object]] = {
    "text": lambda fields: fields.text("x"),
    "count": lambda fields: fields.count("x"),
    "number": lambda fields: fields.number("x"),
    "flag": lambda fields: fields.flag("x"),
    "items": lambda fields: fields.items("x", 3),
    "objects": lambda fields: fields.objects("x", 3),
    "object": lambda fields: fields.object("x"),
    "mapping": lambda fields: fields.mapping("x"),
    "optional_text": lambda fields: fields.optional_text("x"),
    "optional_number": lambda fields: fields.optional_number("x"),
}
ACCEPTED = {
    "text": {"word"},
    "count": {"0", "7"},
    "number": {"0", "7", "0.5", "-1"},
    "flag": {"true"},
    "items": {"[]", "[1]", "[{}]"},
    "objects": {"[]", "[{}]"},
    "object": {"{}"},
    "mapping": {"{}"},
    "optional_text": {"null", "word"},
    "optional_number": {"null", "0", "7", "0.5", "-1"},
}
SPELLED: dict[str, object] = {
    "null": None, "true": True, "0": 0, "7": 7, "-1": -1, "0.5": 0.5, "word": "word", "[]": [], "[1]": [1],
    "[{}]": [{}], "{}": {}, "four": [{}, {}, {}, {}],
}  # fmt: skip


def read(body: bytes | str) -> Fields | Rejected:
    return guarded(lambda: parse_object(body, LONGEST))


@given(st.binary(max_size=200) | st.text(max_size=200))
@settings(deadline=None)
def test_any_bytes_give_an_object_or_a_reason(body: bytes | str) -> None:
    assert isinstance(read(body), Fields | Rejected)


@given(VALUES)
@settings(deadline=None)
def test_only_objects_are_objects(value: object) -> None:
    assert isinstance(read(json.dumps(value)), Fields) == isinstance(value, dict)


def nested(levels: int, opening: str, closing: str) -> str:
    return '{"x":' + opening * levels + "1" + closing * levels + "}"


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_deep_nesting_is_refused_before_it_can_hurt_a_reader(opening: str, closing: str) -> None:
    for levels in (1, 8, 15):
        assert isinstance(guarded(partial(parse_object, nested(levels, opening, closing), LONGEST)), Fields)
    for levels in (40, 400, *range(900, 1000, 7), 100_000):
        assert isinstance(guarded(partial(parse_object, nested(levels, opening, closing), 10**6)), Rejected), levels


@pytest.mark.parametrize("body", ['{"a":1,"a":1}', '{"b":{"a":1,"a":2}}', '{"b":[{"a":1,"c":0,"a":2}]}'])
def test_a_name_that_occurs_twice_is_refused(body: str) -> None:
    assert read(body) == Rejected("a name occurs twice")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "9" * 5000])
def test_numbers_that_no_double_holds_are_refused(number: str) -> None:
    assert isinstance(guarded(lambda: parse_object(f'{{"x":{number}}}', LONGEST).number("x")), Rejected)
    assert isinstance(guarded(lambda: parse_object(f'{{"x":{number}}}', LONGEST).count("x")), Rejected)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("spelled", SPELLED)
def test_a_field_is_read_only_as_what_it_is(reader: str, spelled: str) -> None:
    fields = Fields({"x": SPELLED[spelled]})
    found = guarded(lambda: READERS[reader](fields))
    assert isinstance(found, Rejected) == (spelled not in ACCEPTED[reader])


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_field_is_named(reader: str) -> None:
    assert guarded(lambda: READERS[reader](Fields({}))) == Rejected("x is missing")


@given(st.sampled_from(sorted(READERS)), VALUES)
@settings(deadline=None)
def test_no_value_raises_past_the_guard(reader: str, value: object) -> None:
    guarded(lambda: READERS[reader](Fields({"x": value})))


def test_bounds_hold_on_both_sides() -> None:
    fields = Fields({"most": COUNT_MAX, "more": COUNT_MAX + 1, "long": "x" * 11, "list": [1, 2, 3, 4]})
    assert fields.count("most") == COUNT_MAX
    for refused in (
        lambda: fields.count("more"),
        lambda: fields.count("most", 5),
        lambda: fields.text("long", longest=10),
        lambda: fields.items("list", 3),
    ):
        assert isinstance(guarded(refused), Rejected)
    assert isinstance(guarded(lambda: parse_object(b" " * 11, 10)), Rejected)


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        (SHA256, "a" * 64, True),
        (SHA256, "a" * 63, False),
        (SHA256, "a" * 64 + "\n", False),
        (SHA256, "A" * 64, False),
        (SHA256, "٣" * 64, False),
        (HEX, "0f", True),
        (HEX, "", False),
        (HEX, "0x1", False),
    ],
)
def test_patterns_fit_whole_texts(pattern: re.Pattern[str], text: str, fits: bool) -> None:
    found = guarded(lambda: Fields({"x": text}).text("x", pattern))
    assert isinstance(found, str) == fits


def test_a_reason_says_where() -> None:
    fields = Fields({"outer": {"lr": "fast"}, "list": [{}, {"n": -1}]})
    assert guarded(lambda: fields.object("outer").number("lr")) == Rejected("outer.lr is not a finite number")
    refusal = guarded(lambda: fields.objects("list", 2)[1].count("n"))
    assert isinstance(refusal, Rejected) and refusal.reason.startswith("list[1].n is not a count")


def test_other_exceptions_are_not_hidden() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guarded(broken)
    with pytest.raises(FieldRefused):
        parse_object(b"[]", LONGEST)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
@settings(deadline=None)
def test_canonical_bytes_come_back_and_do_not_depend_on_order(value: dict[str, Any]) -> None:
    body = canonical_json(value)
    assert json.loads(body) == value
    assert canonical_json(dict(reversed(value.items()))) == body
    body.decode("ascii")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_canonical_json_knows_no_infinity(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"x": value})
