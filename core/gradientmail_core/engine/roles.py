"""What a node takes upon itself: train, close rounds, or both; and how its lease says so.

========  ======  ======  ==========================================================
role      trains  closes
========  ======  ======  ==========================================================
both      yes     yes     the default
learner   yes     never   for nodes with little upload; somebody else must close
either    yes     yes     stops training and closes for all while the run has elected it its syncer
syncer    never   yes     needs no training framework; relieves all others of closing
========  ======  ======  ==========================================================

While a syncer lives, the others hand their fragments over to it and train on.
"""

from typing import Literal, TypeAlias, get_args

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.keys import LeaseState

Role: TypeAlias = Literal["both", "learner", "either", "syncer"]

CLOSES_NOTHING: frozenset[LeaseState] = frozenset({"l", "v", "p"})
_AS_LEARNER: dict[LeaseState, LeaseState] = {"t": "l", "w": "v", "e": "p"}


def checked_role(role: str) -> Role:
    """``role`` itself, or :class:`ConfigurationError`."""
    if role not in get_args(Role):
        raise ConfigurationError(f"role is {role!r}.", f"Use one of {', '.join(get_args(Role))}.")
    return role  # type: ignore[return-value]  # checked above


def trainers_role(role: str) -> Role:
    """``role`` itself, or :class:`ConfigurationError` for what is none or trains nothing."""
    if checked_role(role) == "syncer":
        raise ConfigurationError(
            "role is 'syncer', which trains nothing.", "Start it with `gradientmail syncer URL`, or use 'either'."
        )
    return checked_role(role)


def state_of(role: Role, doing: LeaseState) -> LeaseState:
    """The lease state by which a node of this role says that it trains (t), waits (w), is paused (e), or the like."""
    if role == "learner":
        return _AS_LEARNER.get(doing, doing)
    return "s" if role == "syncer" and doing in _AS_LEARNER else doing
