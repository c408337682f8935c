"""A node's beats, and its view of the others' beats; the same leases as those of every other algorithm.

Beat n-1 stays until n+1 exists, so a listing that lags never shows a living node as gone. A start continues after
the highest beat found under the node's name.
"""

from collections.abc import Callable, Sequence

from gradientmail_core.engine.gossip_gathering import list_leases
from gradientmail_core.engine.run import Board, Host
from gradientmail_core.errors import RunMismatch
from gradientmail_core.events import RunWaited
from gradientmail_core.protocol.keys import LeaseKey, LeaseState
from gradientmail_core.protocol.leases import lease_body

WAITING_POLL_SECONDS = 1.0
WAITING_REPORT_SECONDS = 10.0
WAITING_REPORT_GROWTH = 2.0


class Presence:
    """The lease of this node. ``local_step`` tells how far its training is."""

    def __init__(self, host: Host, board: Board, local_step: Callable[[], int]) -> None:
        self._host = host
        self._board = board
        self._local_step = local_step
        self._number = 0
        self._old: list[LeaseKey] = []
        self.state: LeaseState = "j"

    async def enter(self, leases: Sequence[LeaseKey]) -> None:
        """Write the first beat, after the highest of this name among ``leases``."""
        self._old = sorted((lease for lease in leases if lease.node == self._host.node), key=lambda lease: lease.beat)
        self._number = self._old[-1].beat + 1 if self._old else 0
        await self.beat()

    async def beat(self, state: LeaseState | None = None) -> None:
        """Write a beat."""
        self.state = state or self.state
        number, self._number = self._number, self._number + 1
        lease = LeaseKey(self._host.node, number, self.state, self._local_step(), self._host.incarnation)
        await self._host.mailbox.put(lease.path, lease_body(self._host.framework))
        self._board.own_beat(lease)
        self._old.append(lease)
        while len(self._old) > 2:
            await self._host.mailbox.delete(self._old.pop(0).path)

    async def keep_beating(self) -> None:
        """Beat once a period, for ever."""
        while True:
            await self._host.clock.sleep(self._host.jitter(self._host.timeouts.period))
            await self.beat()

    async def keep_listing(self) -> None:
        """Look at the others once a period, for ever."""
        while True:
            await self._host.clock.sleep(self._host.jitter(self._host.timeouts.period))
            await self.look()

    async def look(self) -> None:
        """List the beats. Raises :class:`RunMismatch` if another process has this node's name."""
        for key in await list_leases(self._host, self._board):
            if key.node != self._host.node or key.tag == self._host.incarnation:
                continue
            if key.beat >= self._number and key.state != "x":
                raise RunMismatch(
                    f"Another process runs as node {key.node!r} in this run.", "Give each process a name of its own."
                )

    async def wait_for(self, nodes: int) -> None:
        """Until so many nodes train or wait; says whom it sees, at growing intervals."""
        clock, pause = self._host.clock, WAITING_REPORT_SECONDS
        report_at = clock.now()
        beat_at = clock.now() + self._host.timeouts.period
        while len(here := self._board.here()) < nodes:
            await self.look()
            if clock.now() >= report_at:
                self._host.emit(
                    RunWaited(f"waiting for {nodes - len(here)} more node(s) (have: {', '.join(here) or 'none'})")
                )
                report_at, pause = clock.now() + pause, pause * WAITING_REPORT_GROWTH
            if clock.now() >= beat_at:
                await self.beat()
                beat_at = clock.now() + self._host.timeouts.period
            await clock.sleep(min(WAITING_POLL_SECONDS, self._host.timeouts.period / 5))

    async def bury(self) -> None:
        """Delete the leases of nodes that left or have long been silent."""
        for key in self._board.dead_leases():
            await self._host.mailbox.delete(key.path)
