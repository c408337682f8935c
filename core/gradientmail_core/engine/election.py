"""Who closes a fragment's next round: rendezvous hashing over the live closers, one hand-over at a time.

The committer keeps a fragment unless it is leaving, or holds more than its fair share while another node holds
less; then the one of those first in rendezvous order gets it. So closing spreads over the nodes, moves when
they come and go, and never moves without need. Where one node closes all fragments it keeps them all until it leaves;
if two have each taken some over from the same dead one, their next records name one of them for all. All of this is
pure: everyone who sees the same nodes names the same owner.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache


def rendezvous(run: str, fragment: int, nodes: Sequence[str]) -> tuple[str, ...]:
    """``nodes`` in their order of claim on a fragment: highest hash first (rendezvous hashing)."""
    return _rendezvous(run, fragment, tuple(nodes))


@lru_cache(maxsize=256)
def _rendezvous(run: str, fragment: int, nodes: tuple[str, ...]) -> tuple[str, ...]:
    def score(node: str) -> bytes:
        return hashlib.sha256(f"{run}/{fragment}/{node}".encode()).digest()

    return tuple(sorted(nodes, key=score, reverse=True))


def next_closer(
    me: str, *, run: str, fragment: int, closers: Mapping[int, str], live: Sequence[str], leaving: bool
) -> str:
    """The closer that ``me``, committing a round of ``fragment``, names for the next one.

    ``closers`` maps every fragment to the closer its newest record names, as far as ``me`` knows. A fragment is
    handed over when ``me`` is leaving, is no candidate itself (a syncer lives), or holds more than a fair share while
    another holds less.
    """
    others = [node for node in live if node != me]
    if not others:
        return me
    if leaving or me not in live:
        return rendezvous(run, fragment, others)[0]
    fair_share = -(-len(closers) // (len(others) + 1))
    held = Counter(closers.values())
    free = [node for node in others if held[node] < fair_share]
    return rendezvous(run, fragment, free)[0] if held[me] > fair_share and free else me


def next_of_all(me: str, *, run: str, closers: Mapping[int, str], live: Sequence[str], leaving: bool) -> str:
    """The closer of every fragment that ``me`` names where one node closes all (stores that cannot decide races).

    Arguments as for :func:`next_closer`.
    """
    if leaving or me not in live:
        return rendezvous(run, 0, [node for node in live if node != me] or [me])[0]
    return rendezvous(run, 0, sorted({me, *closers.values()}.intersection(live)))[0]
