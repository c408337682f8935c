"""A node's own lease: its beats, written in growing order and removed once they are replaced.

Beat n-1 stays until n+1 exists, so a listing that lags never shows a living node as gone. A start continues after the
highest beat found under the node's name, and goes ahead of what an older process of that name left: its last write
may land late. Beats that landed although whoever wrote them believed them lost, or was interrupted, count as written
once a listing shows them, and are removed when they are replaced.
"""

from collections.abc import Callable, Iterable

from gradientmail_core.engine.run import Board
from gradientmail_core.errors import RunMismatch
from gradientmail_core.protocol.keys import LeaseKey, LeaseState, LiveKey
from gradientmail_core.protocol.leases import lease_body

BEATS_KEPT = 2
BEATS_LEFT_MOST = 3


class Lease:
    """The beats of the board's node; ``local_step`` tells how far its training is."""

    def __init__(self, board: Board, local_step: Callable[[], int]) -> None:
        self._board = board
        self._local_step = local_step
        self._number = 0
        self._written: list[LeaseKey] = []
        self._namesakes: set[str] = set()

    @property
    def newest(self) -> LeaseKey:
        """The last beat written."""
        return self._written[-1]

    def continued(self, leases: Iterable[LeaseKey]) -> None:
        """Go on after the highest beat of this node among ``leases``."""
        own = (lease for lease in leases if lease.node == self._board.host.node)
        self._written = sorted(own, key=lambda lease: lease.beat)
        self._number = self._written[-1].beat + 1 if self._written else 0

    async def beat(self, state: LeaseState) -> None:
        """Write a beat, and remove those before the last."""
        host = self._board.host
        number, self._number = self._number, self._number + 1
        lease = LeaseKey(host.node, number, state, self._local_step(), host.incarnation)
        await host.mailbox.put(lease.path, lease_body(host.framework))
        self._board.own_beat(lease)
        await self._wrote([lease])

    async def _wrote(self, leases: Iterable[LeaseKey]) -> None:
        self._written = sorted({*self._written, *leases}, key=lambda lease: lease.beat)
        while len(self._written) > BEATS_KEPT:
            await self._board.host.mailbox.delete(self._written.pop(0).path)

    def passed(self, keys: Iterable[LiveKey]) -> bool:
        """Whether another incarnation of this node beats ahead, and a beat is due; if it comes past again, it lives.

        A dead one may have left three beats at most, of which a lagging listing showed the first, and the last may
        land late. Raises :class:`RunMismatch` for a live one, in the older process as a rule.
        """
        host = self._board.host
        ahead = [
            key
            for key in keys
            if isinstance(key, LeaseKey)
            and key.node == host.node
            and key.tag != host.incarnation
            and key.beat >= self._number
            and key.state != "x"
        ]
        if any(key.tag in self._namesakes for key in ahead):
            raise RunMismatch(
                f"Another process runs as node {host.node!r} in this run.", "Give each process a name of its own."
            )
        for key in ahead:
            self._namesakes.add(key.tag)
            self._number = max(self._number, key.beat + BEATS_LEFT_MOST)
        return bool(ahead)

    async def drop_late(self) -> None:
        """Take in this node's beats that landed unknown to it, and delete what is older than those kept."""
        host, kept = self._board.host, self._written[0].beat if self._written else 0
        own = [key for key in self._board.leases if key.node == host.node]
        await self._wrote(key for key in own if key.tag == host.incarnation and kept <= key.beat < self._number)
        for key in own:
            if key.beat < kept:
                await host.mailbox.delete(key.path)

    async def bury(self) -> None:
        """Delete the leases of nodes that left or have long been silent."""
        for key in self._board.dead_leases():
            await self._board.host.mailbox.delete(key.path)
