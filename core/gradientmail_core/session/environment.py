"""Settings from the environment, for command lines and for ``Trainer(strategy="gradientmail")``.

``GRADIENTMAIL_MAILBOX`` and ``GRADIENTMAIL_NODE`` say where and who; ``GRADIENTMAIL_SYNC_EVERY`` and the
like set the plain fields of :class:`DiLoCo`. An argument in the program wins over the environment.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Final, TypeAlias

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.roles import trainers_role
from gradientmail_core.errors import ConfigurationError

Plain: TypeAlias = int | float | str | bool | None
"""What a command line can say."""

PREFIX: Final = "GRADIENTMAIL_"
_FIELDS: Final = (
    "sync_every",
    "fragments",
    "in_flight",
    "overlap_steps",
    "quorum_size",
    "grace_seconds",
    "delta_codec",
    "global_batch_size",
)


def mailbox_from(environment: Mapping[str, str]) -> str:
    """The mailbox's URL; :class:`ConfigurationError` if the environment does not say."""
    url = environment.get(PREFIX + "MAILBOX")
    if not url:
        raise ConfigurationError("No mailbox was given.", f"Pass mailbox='file:///shared/run', or set {PREFIX}MAILBOX.")
    return url


def role_from(role: str | None, environment: Mapping[str, str]) -> str:
    """The role of a node that trains: the one given, else the environment's, else "both".

    Raises :class:`ConfigurationError` for what is none.
    """
    return trainers_role(role or environment.get(PREFIX + "ROLE") or "both")


def handoff_from(every: int | None, node: str | None, environment: Mapping[str, str]) -> int | None:
    """Steps between two hand-offs: those given, else the environment's, else None.

    Raises :class:`ConfigurationError` for what is no such number, and where the node has no name to be found by.
    """
    name = PREFIX + "HANDOFF_EVERY"
    found = _value(name, environment[name]) if every is None and name in environment else every
    if found is None:
        return None
    if type(found) is not int or found < 1:
        raise ConfigurationError(f"handoff_every is {found!r}.", "Use a number of steps, such as 1000.")
    if node is None:
        raise ConfigurationError(
            "A hand-off needs a node's name to be found by.",
            f"Give node=..., or set {PREFIX}NODE, the same at each start.",
        )
    return found


def algorithm_from(environment: Mapping[str, str]) -> DiLoCo:
    """DiLoCo with the fields that the environment sets; :class:`ConfigurationError` for one that cannot be."""
    names = {field: PREFIX + field.upper() for field in _FIELDS}
    chosen = {field: _value(name, environment[name]) for field, name in names.items() if name in environment}
    return DiLoCo(**chosen)  # type: ignore[arg-type]  # numbers, which DiLoCo checks


def algorithm_with(settings: Mapping[str, Plain]) -> DiLoCo:
    """DiLoCo with the plain fields in ``settings``, as a command line or a YAML file gives them.

    Raises :class:`ConfigurationError` for one that it does not have, or that cannot be.
    """
    known = {field.name for field in fields(DiLoCo)}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigurationError(
            f"DiLoCo has no setting {', '.join(unknown)}.", f"Use some of {', '.join(sorted(known))}."
        )
    return DiLoCo(**settings)  # type: ignore[arg-type]  # plain values, which DiLoCo checks


def _value(name: str, text: str) -> object:
    if name.endswith("_CODEC"):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ConfigurationError(f"{name} is {text!r}.", "Set it to a number, or to null.")
