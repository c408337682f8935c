"""A gossip node's beats, and its view of the others' beats; the same leases as those of every other algorithm."""

from collections.abc import Callable, Sequence

from gradientmail_core.engine.gossip_gathering import list_leases
from gradientmail_core.engine.lease import Lease
from gradientmail_core.engine.run import Board, Host
from gradientmail_core.events import RunWaited
from gradientmail_core.protocol.keys import LeaseKey, LeaseState

WAITING_POLL_SECONDS = 1.0
WAITING_REPORT_SECONDS = 10.0
WAITING_REPORT_GROWTH = 2.0


class Presence:
    """The lease of this node. ``local_step`` tells how far its training is."""

    def __init__(self, host: Host, board: Board, local_step: Callable[[], int]) -> None:
        self._host = host
        self._board = board
        self._lease = Lease(board, local_step)
        self.state: LeaseState = "j"

    async def enter(self, leases: Sequence[LeaseKey]) -> None:
        """Write the first beat, after the highest of this name among ``leases``."""
        self._lease.continued(leases)
        await self.beat()

    async def beat(self, state: LeaseState | None = None) -> None:
        """Write a beat, in this state from now on if one is given."""
        self.state = state or self.state
        await self._lease.beat(self.state)

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
            await self._lease.drop_late()

    async def look(self) -> None:
        """List the beats. Raises :class:`RunMismatch` if another process has this node's name."""
        if self._lease.passed(await list_leases(self._host, self._board)):
            await self.beat()

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
        await self._lease.bury()
