"""Removing what a chain no longer needs, by version, by the node that committed last.

After version ``v`` of a fragment, the snapshots of its closed round and the payloads that only version
``v - 2`` or older named may go; so the two newest versions of every fragment are always complete. Versions of
different fragments are never compared. Records are never deleted, nor are the initial parameters. While a node
is joining, removals wait, because it may be loading what was a head when it arrived.
"""

from collections.abc import Collection, Iterable, Sequence

from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.run import Board, Host, Run
from gradientmail_core.protocol.exchange import Decided, read_round
from gradientmail_core.protocol.keys import BLOBS, ClaimKey, DeltaKey, HeadKey, blob_round
from gradientmail_core.protocol.records import Section

HEAD_HINT_SECONDS = 15.0
KEPT_VERSIONS = 2
ORPHANS_EVERY = 100


class Sweeper:
    """Removals of one chain, kept back while a node joins."""

    def __init__(self, host: Host, run: Run, board: Board) -> None:
        self._host = host
        self._run = run
        self._board = board
        self._sections: dict[int, tuple[Section, ...]] = {}
        self._waiting: set[str] = set()
        self._hinted_at: float | None = None
        self._swept_version = 0

    async def committed(self, head: Head, heard: Iterable[str]) -> None:
        """Sweep after this node committed ``head``; ``heard`` are the nodes whose snapshots were seen."""
        round = head.next_round(self._run.fragments) - self._run.fragments
        self._waiting.update(DeltaKey(round, node).path for node in heard)
        self._collect(head.fragment)
        self._sections[head.version] = head.sections
        for version in range(
            max(self._swept_version + 1, head.version - KEPT_VERSIONS), head.version - KEPT_VERSIONS + 1
        ):
            self._waiting.update(await self._obsolete(head.fragment, version))
            self._swept_version = version
        await self.hint(head)
        await self._remove()
        if head.fragment == 0 and head.version % ORPHANS_EVERY == 0:
            await remove_orphans(self._host, self._run, self._board)

    async def tidy(self, fragment: int) -> None:
        """Remove what a listing showed of closed rounds: snapshots that came late, claims, a dead closer's leavings."""
        self._collect(fragment)
        await self._remove()

    def _collect(self, fragment: int) -> None:
        for round in self._board.closed_rounds(fragment):
            self._waiting.update(DeltaKey(round, node).path for node in self._board.deltas.get(round, ()))
            self._waiting.update(ClaimKey(round, number).path for number in self._board.claims.get(round, ()))
            self._board.forget(round)

    async def discard(self, ours: Collection[Section], keep: Collection[Section]) -> None:
        """Remove the payloads of a commit that lost its race, unless the winner names the same bytes."""
        kept = {section.key for section in keep}
        for section in ours:
            if section.key not in kept:
                await self._host.mailbox.delete(section.key)

    async def hint(self, head: Head, *, force: bool = False) -> None:
        """Write a hint at the head, at most once in 15 s unless forced, and remove older ones."""
        now = self._host.clock.now()
        if not force and self._hinted_at is not None and now - self._hinted_at < HEAD_HINT_SECONDS:
            return
        self._hinted_at = now
        round = head.next_round(self._run.fragments) - self._run.fragments
        await self._host.mailbox.put(HeadKey(head.fragment, round).path, b"{}")
        older = [key for key in self._board.heads if key.fragment == head.fragment and key.round < round]
        self._waiting.update(key.path for key in older)

    async def _obsolete(self, fragment: int, version: int) -> set[str]:
        """Keys that ``version`` named and its two successors do not; none unless all three records were found."""
        versions = range(version, version + KEPT_VERSIONS + 1)
        found = [sections for each in versions if (sections := await self._named(fragment, each))]
        self._sections.pop(version, None)
        if len(found) < len(versions):
            return set()
        old, *newer = [{section.key for section in sections} for sections in found]
        return old.difference(*newer, (section.key for section in self._run.manifest.theta))

    async def _named(self, fragment: int, version: int) -> Sequence[Section]:
        """The sections of a version; empty if its record was not found this time."""
        if version not in self._sections:
            state = await read_round(self._host.mailbox, self._run.id, version * self._run.fragments + fragment)
            if not isinstance(state, Decided):
                return ()
            self._sections[version] = state.record.sections
        return self._sections[version]

    async def _remove(self) -> None:
        if self._board.joining():
            return
        waiting, self._waiting = self._waiting, set()
        for key in sorted(waiting):
            await self._host.mailbox.delete(key)


async def remove_orphans(host: Host, run: Run, board: Board) -> None:
    """Remove payloads that no record of their fragment's two newest versions names and that are older than those.

    They are what a crash between a payload and its record leaves, or between a commit and its sweep. One listing of
    ``blobs/`` in :data:`ORPHANS_EVERY` versions; nothing is removed while a node joins, or one of those records is
    not found.
    """
    if board.joining():
        return
    named: set[str] = set()
    for fragment, open_round in board.open_rounds.items():
        newest = open_round // run.fragments - 1
        for version in range(max(newest - KEPT_VERSIONS + 1, 1), newest + 1):
            state = await read_round(host.mailbox, run.id, version * run.fragments + fragment)
            if not isinstance(state, Decided):
                return
            named.update(section.key for section in state.record.sections)
    keys = [entry.key async for entry in host.mailbox.list(BLOBS)]
    for key in keys:
        round = blob_round(key)
        if round is None or key in named or round < run.fragments:
            continue
        if round + KEPT_VERSIONS * run.fragments < board.open_rounds[round % run.fragments]:
            await host.mailbox.delete(key)
