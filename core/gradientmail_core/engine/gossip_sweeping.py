"""Removing what no node needs any more; the creator of a round's roster does it, once a round.

Objects of rounds up to ``t-3`` go, except that the two newest means of every fragment always stay: joiners and
exports take the newest, and what reads the one before must find its payloads. A mean's record goes before its
payloads, so no record ever names what is not there. A payload without a record (its averager died in between) goes
with its round. The initial parameters stay. A listing that lags may hide a mean; then older ones are kept, and
nothing newer than those is removed.
"""

import asyncio
from collections.abc import Sequence

from gradientmail_core.engine.gossip_roster import Listed
from gradientmail_core.engine.gossip_shares import GossipRun, payload_number
from gradientmail_core.engine.run import Host
from gradientmail_core.protocol.gossip import GossipKey, MeanKey
from gradientmail_core.protocol.keys import BLOBS, blob_round

ROUNDS_KEPT = 3
MEANS_KEPT = 2
DELETED_AT_ONCE = 16


def kept_means(listed: Listed, fragments: int) -> frozenset[MeanKey]:
    """The newest means of every fragment, in full."""
    return frozenset(
        MeanKey(round, fragment, full=True)
        for fragment in range(fragments)
        for round in listed.means(fragment)[:MEANS_KEPT]
    )


def outlived(listed: Listed, round: int, fragments: int) -> list[GossipKey]:
    """Keys that may go once ``round`` has begun; records before anything else."""
    kept = kept_means(listed, fragments)
    old = [key for key in listed.keys if key.round <= round - ROUNDS_KEPT and key not in kept]
    return sorted(old, key=lambda key: (not isinstance(key, MeanKey), key.path))


async def sweep(host: Host, run: GossipRun, listed: Listed, round: int) -> None:
    """Remove what ``round``, which has begun, leaves behind."""
    gone = outlived(listed, round, len(run.layouts))
    await _deleted(host, [key.path for key in gone if isinstance(key, MeanKey)])
    await _deleted(host, [key.path for key in gone if not isinstance(key, MeanKey)])
    await _sweep_payloads(host, run, listed, round)


async def _sweep_payloads(host: Host, run: GossipRun, listed: Listed, round: int) -> None:
    """Payloads older than every mean that is kept; none while a listing shows fewer means than are kept."""
    kept = kept_means(listed, len(run.layouts))
    if len(kept) < MEANS_KEPT * len(run.layouts):
        return
    oldest = payload_number(min(min(key.round for key in kept), round - ROUNDS_KEPT + 1), 0, len(run.layouts))
    initial = {section.key for section in run.manifest.theta}
    stale = [
        entry.key
        async for entry in host.mailbox.list(BLOBS)
        if entry.key not in initial and (written := blob_round(entry.key)) is not None and written < oldest
    ]
    await _deleted(host, stale)


async def _deleted(host: Host, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), DELETED_AT_ONCE):
        await asyncio.gather(*(host.mailbox.delete(key) for key in keys[start : start + DELETED_AT_ONCE]))
