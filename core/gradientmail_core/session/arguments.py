"""What a user gives a session, checked: a clear error before anything is joined or counted."""

import operator
import re
import secrets
import socket

from gradientmail_core.errors import ConfigurationError


def whole_number(samples: object) -> int:
    """``samples`` as a plain count, whatever kind of integer it is (numpy's, a tensor of one element)."""
    try:
        count = operator.index(samples)  # type: ignore[arg-type]  # what is no whole number raises
    except TypeError:
        raise ConfigurationError(f"step({samples!r}) is no number of samples.", "Give a whole number.") from None
    if count < 0:
        raise ConfigurationError(f"step({count}) claims a negative number of samples.", "Count from 0.")
    return count


def length_of(batch: object) -> int:
    """How many samples a batch holds; 1 if it has no length."""
    try:
        return len(batch)  # type: ignore[arg-type]  # what has no length raises
    except TypeError:
        return 1


def default_node() -> str:
    """A name for this process: the host's, shortened to what a key allows, and six random hex digits."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:40] or "node"
    return f"{host}-{secrets.token_hex(3)}"


def check_numbers(min_nodes: int, lease_timeout: float, progress_timeout: float) -> None:
    """Raise :class:`ConfigurationError` for a count or a time-out that cannot work."""
    if min_nodes < 1:
        raise ConfigurationError(f"min_nodes is {min_nodes}.", "Use 1 or more.")
    if lease_timeout <= 0 or progress_timeout <= 0:
        raise ConfigurationError("A timeout is not positive.", "Use seconds above 0, such as lease_timeout=120.")
