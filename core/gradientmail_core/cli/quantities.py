"""Numbers with units, as people write them: ``100Mbit``, ``1h``, ``1.5B``, ``2GB``."""

import argparse
import re
from collections.abc import Callable, Mapping

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\Z")
_SECONDS: Mapping[str, float] = {"": 1, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_BITS: Mapping[str, float] = {"bit": 1, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9, "Tbit": 1e12}
_BYTES: Mapping[str, float] = {"B": 8, "kB": 8e3, "MB": 8e6, "GB": 8e9}
_COUNTS: Mapping[str, float] = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def seconds(text: str) -> float:
    """A duration: ``90``, ``1.5s``, ``30min``, ``1h``."""
    return _measured(text, _SECONDS, "a duration such as 0.8s, 30min or 1h")


def bandwidth(text: str) -> float:
    """Bytes per second of ``100Mbit``, ``1Gbit/s``, ``12MB/s``; a unit is needed."""
    units = {**_BITS, **_BYTES}
    per_second = {name + suffix: bits for name, bits in units.items() for suffix in ("", "/s", "ps")}
    return _measured(text, per_second, "a bandwidth such as 100Mbit, 1Gbit or 12MB/s") / 8


def count(text: str) -> int:
    """A number of things: ``124M``, ``1.5B``, ``7000000``."""
    return round(_measured(text, _COUNTS, "a count such as 124M or 1.5B"))


def positive(text: str) -> int:
    """A whole number from 1 up."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return number


def share(text: str) -> float:
    """A share from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return number


def bytes_text(number: float) -> str:
    """Bytes as people read them."""
    return _scaled(number, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(number: float) -> str:
    """A count as people read it."""
    return _scaled(number, ("", "k", "M", "B", "T"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    place = 0
    while number >= 999.5 and place < len(units) - 1:
        number, place = number / 1000, place + 1
    return f"{number:.3g} {units[place]}".strip()


def _measured(text: str, units: Mapping[str, float], what: str) -> float:
    match = _NUMBER.match(text.strip())
    if match is None or match[2] not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    number = float(match[1]) * units[match[2]]
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return number


Reader = Callable[[str], float]
