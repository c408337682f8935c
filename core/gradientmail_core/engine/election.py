"""Who closes a fragment's next round: rendezvous hashing over the live closers, one hand-over at a time.

The committer keeps a fragment unless it is leaving, or another node owns it by rendezvous and the committer
holds more than its fair share. So closing spreads over the nodes, moves when they come and go, and never
moves without need. All of this is pure: everyone who sees the same nodes names the same owner.
"""

import hashlib
from collections.abc import Sequence


def rendezvous(run: str, fragment: int, nodes: Sequence[str]) -> tuple[str, ...]:
    """``nodes`` in their order of claim on a fragment: highest hash first (rendezvous hashing)."""

    def score(node: str) -> bytes:
        return hashlib.sha256(f"{run}/{fragment}/{node}".encode()).digest()

    return tuple(sorted(nodes, key=score, reverse=True))


def next_closer(
    me: str,
    *,
    run: str,
    fragment: int,
    fragments: int,
    held: int,
    live: Sequence[str],
    leaving: bool,
    able: bool = True,
) -> str:
    """The closer that ``me``, committing a round of ``fragment``, names for the next one.

    ``held`` counts the fragments whose newest record names ``me``; ``able`` is False if ``me`` may not go on
    closing, such as a learner while a dedicated syncer lives.
    """
    others = [node for node in live if node != me]
    if leaving or not able:
        return rendezvous(run, fragment, others)[0] if others else me
    owner = rendezvous(run, fragment, [me, *others])[0]
    fair_share = -(-fragments // (len(others) + 1))
    return owner if held > fair_share else me
