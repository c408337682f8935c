"""Strict reading of JSON that strangers may have written.

:func:`parse_object` bounds size and depth, refuses duplicate names, and hands out fields only after
checking their type and range. Inside a parser a bad field raises :class:`FieldRefused`, which
:func:`guarded` turns into a :class:`Rejected` value: content never raises past a parser.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

T = TypeVar("T")

COUNT_MAX = 2**53
DEEPEST = 32
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
HEX = re.compile(r"[0-9a-f]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class Rejected:
    """Bytes that are not what their key says, and why."""

    reason: str


class FieldRefused(Exception):
    """A field is missing, of another type, or out of range; never leaves this package."""


class Fields:
    """A JSON object whose fields are read with their type and bounds."""

    def __init__(self, raw: object, where: str = "") -> None:
        if not isinstance(raw, dict):
            raise FieldRefused(f"{where or 'the body'} is not an object")
        self._raw = raw
        self._where = where

    def _named(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def _get(self, name: str) -> object:
        if name not in self._raw:
            raise FieldRefused(f"{self._named(name)} is missing")
        return self._raw[name]

    def text(self, name: str, pattern: re.Pattern[str] | None = None, longest: int = 1024) -> str:
        """A string of at most ``longest`` characters that fits ``pattern``."""
        value = self._get(name)
        if not isinstance(value, str) or len(value) > longest or (pattern is not None and not pattern.match(value)):
            raise FieldRefused(f"{self._named(name)} is not the text expected")
        return value

    def optional_text(self, name: str, pattern: re.Pattern[str] | None = None) -> str | None:
        """A string, or None where the field is null."""
        return None if self._get(name) is None else self.text(name, pattern)

    def count(self, name: str, most: int = COUNT_MAX) -> int:
        """A whole number from 0 to ``most``."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise FieldRefused(f"{self._named(name)} is not a count up to {most}")
        return value

    def optional_count(self, name: str) -> int | None:
        """A whole number, or None where the field is null."""
        return None if self._get(name) is None else self.count(name)

    def number(self, name: str) -> float:
        """A finite number."""
        value = self._get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or abs(value) > 1e308
            or not math.isfinite(value)
        ):
            raise FieldRefused(f"{self._named(name)} is not a finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number, or None where the field is null."""
        return None if self._get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise FieldRefused(f"{self._named(name)} is not true or false")
        return value

    def items(self, name: str, most: int) -> Sequence[object]:
        """A list of at most ``most`` values."""
        value = self._get(name)
        if not isinstance(value, list) or len(value) > most:
            raise FieldRefused(f"{self._named(name)} is not a list of at most {most}")
        return value

    def objects(self, name: str, most: int) -> list["Fields"]:
        """A list of objects."""
        return [Fields(item, f"{self._named(name)}[{index}]") for index, item in enumerate(self.items(name, most))]

    def mapping(self, name: str) -> Mapping[str, object]:
        """A nested object as it stands, for settings that their own parser reads."""
        value = self._get(name)
        if not isinstance(value, dict):
            raise FieldRefused(f"{self._named(name)} is not an object")
        return value

    def object(self, name: str) -> "Fields":
        """A nested object."""
        return Fields(self._get(name), self._named(name))


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise FieldRefused("a name occurs twice")
    return fields


def _no_constant(name: str) -> object:
    raise FieldRefused(f"{name} is no JSON number")


_STRICT = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_no_constant)


def parse_object(body: bytes | str, longest: int) -> Fields:
    """The object in ``body``; raises :class:`FieldRefused` for anything else, so call it under :func:`guarded`."""
    if len(body) > longest:
        raise FieldRefused(f"longer than {longest} bytes")
    try:
        text = body if isinstance(body, str) else body.decode("utf-8")
        raw = _STRICT.decode(text)
    except (ValueError, RecursionError) as error:
        raise FieldRefused(f"no JSON: {type(error).__name__}") from None
    if text.count("{") + text.count("[") > DEEPEST:
        _check_depth(raw, DEEPEST)
    return Fields(raw)


def _check_depth(value: object, left: int) -> None:
    if isinstance(value, dict | list):
        if left == 0:
            raise FieldRefused(f"nested deeper than {DEEPEST}")
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, left - 1)


def guarded(parse: Callable[[], T]) -> T | Rejected:
    """The parser's value, or the reason it refused."""
    try:
        return parse()
    except FieldRefused as refusal:
        return Rejected(str(refusal))


def _fields_of(record: object) -> dict[str, object]:
    """A frozen record's fields by name; TypeError for what is no record, as the encoder expects."""
    kind = type(record)
    if kind not in _FIELD_NAMES:
        if not is_dataclass(kind):
            raise TypeError(f"{kind.__name__} has no place in JSON")
        _FIELD_NAMES[kind] = tuple(field.name for field in fields(kind))
    return {name: getattr(record, name) for name in _FIELD_NAMES[kind]}


_FIELD_NAMES: dict[type, tuple[str, ...]] = {}
_CANONICAL = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_fields_of
)


def canonical_json(value: object) -> bytes:
    """One spelling for each value: sorted names, no spaces, ASCII, no NaN. A record is an object of its fields."""
    return _CANONICAL.encode(value).encode()
