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
from gradientmail_core.protocol.keys import ClaimKey, DeltaKey, HeadKey
from gradientmail_core.protocol.records import Section

HEAD_HINT_SECONDS = 15.0
KEPT_VERSIONS = 2


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
        nodes = set(heard) | self._board.deltas.get(round, set())
        self._waiting.update(DeltaKey(round, node).path for node in nodes)
        self._waiting.update(ClaimKey(round, number).path for number in self._board.claims.get(round, ()))
        self._sections[head.version] = head.sections
        for version in range(
            max(self._swept_version + 1, head.version - KEPT_VERSIONS), head.version - KEPT_VERSIONS + 1
        ):
            self._waiting.update(await self._obsolete(head.fragment, version))
            self._swept_version = version
        await self.hint(head)
        if not self._board.joining():
            await self._remove()

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
        """Keys that ``version`` named and its two successors do not."""
        old, *newer = [await self._named(fragment, version + later) for later in range(KEPT_VERSIONS + 1)]
        self._sections.pop(version, None)
        still_named = {section.key for sections in newer for section in sections}
        return {section.key for section in old} - still_named

    async def _named(self, fragment: int, version: int) -> Sequence[Section]:
        if version not in self._sections:
            state = await read_round(self._host.mailbox, self._run.id, version * self._run.fragments + fragment)
            self._sections[version] = state.record.sections if isinstance(state, Decided) else ()
        return self._sections[version]

    async def _remove(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for key in sorted(waiting):
            await self._host.mailbox.delete(key)
