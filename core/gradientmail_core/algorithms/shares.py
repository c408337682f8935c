"""How the live nodes share one batch: in proportion to their speeds, in whole samples that add up exactly.

What every node must agree on stands in records: each node's share and its smoothed speed, named by the closer of
fragment 0. A share changes only when nodes come or go, or when one is off by more than a tenth, so that the noise of
measured steps moves nothing. Until a record names the nodes that live now, each node divides by the speeds of the last
one; so the shares add up on every node's view.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from gradientmail_core.protocol.records import Share

HYSTERESIS = 0.1
SMOOTHING = 0.3


def divided(whole: int, speeds: Mapping[str, float]) -> dict[str, int]:
    """``whole`` samples in proportion to ``speeds``, at least one each; a node without a speed (0) gets a mean one.

    The parts add up to ``whole``, or to the number of nodes if that is more. What rounding leaves goes to the largest
    remainders, by name where they are equal.
    """
    known = [speed for speed in speeds.values() if speed > 0]
    usual = math.fsum(known) / len(known) if known else 1.0
    rates = {node: speed if speed > 0 else usual for node, speed in sorted(speeds.items())}
    spare, total = max(whole - len(rates), 0), math.fsum(rates.values())
    ideal = {node: spare * (rate / total) for node, rate in rates.items()}
    parts = {node: int(part) for node, part in ideal.items()}
    by_remainder = sorted(rates, key=lambda node: (parts[node] - ideal[node], node))
    for node in by_remainder[: spare - sum(parts.values())]:
        parts[node] += 1
    return {node: 1 + part for node, part in parts.items()}


def settled(
    whole: int, before: Sequence[Share], measured: Mapping[str, float], live: Collection[str]
) -> tuple[Share, ...]:
    """The shares after a round in which the speeds of some nodes were ``measured`` (samples per second)."""
    speeds = {share.node: share.speed for share in before}
    for node, speed in measured.items():
        known = speeds.get(node, 0.0)
        speeds[node] = known + SMOOTHING * (speed - known) if known > 0 else speed
    parts = divided(whole, {node: speeds.get(node, 0.0) for node in live})
    held = {share.node: share.samples for share in before}
    if held.keys() == parts.keys() and all(_near(held[node], part) for node, part in parts.items()):
        parts = held
    return tuple(Share(node, parts[node], speeds.get(node, 0.0)) for node in sorted(parts))


def _near(held: int, wanted: int) -> bool:
    return abs(wanted - held) <= max(HYSTERESIS * held, 1.0)


def as_seen(whole: int, shares: Sequence[Share], live: Collection[str]) -> dict[str, int]:
    """Each live node's share: as the newest record names them, or divided anew while other nodes live than it says."""
    held = {share.node: share.samples for share in shares}
    if held.keys() == set(live):
        return held
    speeds = {share.node: share.speed for share in shares}
    return divided(whole, {node: speeds.get(node, 0.0) for node in live})
