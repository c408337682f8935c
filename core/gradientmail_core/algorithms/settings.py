"""Algorithms as plain JSON and back: how a run's manifest names a merge, an outer optimizer, a partition.

Each algorithm is a frozen dataclass; its settings are its class name under ``"name"`` and its fields.
Every value that decides a result is in there, so two nodes that agree on the settings compute the same
bytes. The way back goes through a registry of known classes and the class's own checks: settings come
from the store, and anything unknown or out of range is a :class:`ConfigurationError`, nothing else.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from gradientmail_core.errors import ConfigurationError

T = TypeVar("T")

Settings = dict[str, Any]
"""Plain JSON: strings, numbers, booleans, None, and lists or objects of these."""


class Named:
    """Base of algorithms that are frozen dataclasses with JSON fields."""

    def settings(self) -> Settings:
        """The class name and every field, as plain JSON."""
        fields = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"name": type(self).__name__, **fields}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """An instance with these fields, lists as tuples; :class:`ConfigurationError` if they do not fit."""
        try:
            return cls(**{key: _frozen(value) for key, value in fields.items()})
        except (TypeError, ValueError, OverflowError) as problem:
            raise ConfigurationError(f"The settings of {cls.__name__} do not fit: {problem}") from problem


def named_from(settings: Mapping[str, Any], known: Mapping[str, type[Named]], what: str) -> Named:
    """The algorithm that ``settings`` describes, of the classes in ``known``.

    Raises :class:`ConfigurationError` for an unknown name, an unknown field or a value out of range.
    """
    fields = dict(settings)
    name = fields.pop("name", None)
    if not isinstance(name, str) or name not in known:
        raise ConfigurationError(f"Unknown {what} {name!r}.", f"Known are: {', '.join(sorted(known))}.")
    return known[name].from_fields(fields)


def checked(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise :class:`ConfigurationError` unless ``value`` is a finite number with ``low <= value <= high``."""
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise ConfigurationError(f"{name} is {value!r}.", f"It must be a number from {low:g} to {high:g}.")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
