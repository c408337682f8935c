"""Algorithms as plain JSON and back: how a run's manifest names a merge, an outer optimizer, a partition.

Each algorithm is a frozen dataclass; its settings are its class name under ``"name"`` and its fields.
Every value that decides a result is in there, so two nodes that agree on the settings compute the same
bytes. The way back goes through the classes known here and their own checks: settings come from the
store, and anything unknown or out of range is a :class:`ConfigurationError`, nothing else.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeAlias, TypeVar, cast

from gradientmail_core.errors import ConfigurationError

T = TypeVar("T")

Settings: TypeAlias = dict[str, object]
"""Plain JSON: strings, numbers, booleans, None, and lists of these."""


class Shared(Protocol):
    """The settings of an algorithm: those that every node of a run must have alike."""

    @property
    def master_dtype(self) -> str:
        """The format in which the initial parameters are stored."""
        ...

    def shared_settings(self) -> Settings:
        """What the manifest holds, as plain JSON, the algorithm's name under ``"name"``."""
        ...


class Named:
    """Base of algorithms that are frozen dataclasses with JSON fields."""

    __slots__ = ()

    def settings(self) -> Settings:
        """The class name and every field, as plain JSON."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
        return {"name": type(self).__name__} | {field.name: _plain(getattr(self, field.name)) for field in fields}


def named_from(settings: Mapping[str, object], known: Iterable[type[T]], what: str) -> T:
    """The algorithm that ``settings`` describes, of the classes ``known``; JSON lists become tuples.

    Raises :class:`ConfigurationError` for an unknown name, an unknown field or a value out of range.
    """
    kinds = {kind.__name__: kind for kind in known}
    name = settings.get("name")
    if not isinstance(name, str) or name not in kinds:
        raise ConfigurationError(f"Unknown {what} {name!r}.", f"Known are: {', '.join(sorted(kinds))}.")
    fields = {key: _frozen(value) for key, value in settings.items() if key != "name"}
    try:
        return cast(Callable[..., T], kinds[name])(**fields)
    except (TypeError, ValueError, OverflowError) as problem:
        raise ConfigurationError(f"The settings of {what} {name} do not fit: {problem}") from problem


def checked(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise :class:`ConfigurationError` unless ``value`` is a finite number with ``low <= value <= high``."""
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise ConfigurationError(f"{name} is {value!r}.", f"It must be a number from {low:g} to {high:g}.")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
