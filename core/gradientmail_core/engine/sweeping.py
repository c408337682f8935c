"""Removing what a chain no longer needs, by version, by the node that committed last.

After version ``v`` of a fragment, the snapshots of its closed round and the outer state that only version ``v - 2``
or older named may go. Parameters, and the changes that lead to them, stay until two later versions are *whole*, that
is, have parameters of their own: so the two newest versions of every fragment can always be had. Where every version
is whole, that is one rule: the payloads of ``v - 2`` may go. Versions of different fragments are never compared.
Records are never deleted, nor are the initial parameters. While a node is joining, payloads wait, because it may be
loading what was a head when it arrived; and while the beats were last looked for too long ago to tell.
"""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from heapq import nsmallest

from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.run import Board, Host, Run
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.protocol.exchange import Decided, read_round
from gradientmail_core.protocol.keys import BLOBS, ClaimKey, DeltaKey, HeadKey, blob_round, is_blob_key
from gradientmail_core.protocol.records import Section

HEAD_HINT_SECONDS = 15.0
HEAD_HINT_COMMITS = 3.5  # in intervals, which vary a little
KEPT_VERSIONS = 2
PARAMETERS = frozenset({"theta", "change"})
ORPHANS_EVERY = 100
REMOVED_AT_ONCE = 8


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
        self._waiting.update(await self._obsolete_state(head))
        self._waiting.update(await self._obsolete_parameters(head))
        await self.hint(head)
        await self._remove()
        if head.fragment == 0 and head.version % ORPHANS_EVERY == 0:
            await remove_orphans(self._host, self._run, self._board)

    async def tidy(self, fragment: int) -> None:
        """Remove what a listing showed of closed rounds: snapshots that came late, claims, a dead closer's leavings."""
        self._collect(fragment)
        await self._remove()

    async def release(self) -> None:
        """Remove what was kept back, if no node joins any more."""
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
        """Write a hint at the head, at most once in 15 s and in four commits unless forced, and remove older ones."""
        now = self._host.clock.now()
        least = max(HEAD_HINT_SECONDS, HEAD_HINT_COMMITS * (head.interval or 0.0))
        if not force and self._hinted_at is not None and now - self._hinted_at < least:
            return
        self._hinted_at = now
        round = head.next_round(self._run.fragments) - self._run.fragments
        await self._host.mailbox.put(HeadKey(head.fragment, round).path, b"{}")
        older = [key for key in self._board.heads if key.fragment == head.fragment and key.round < round]
        self._waiting.update(key.path for key in older)

    def saw(self, head: Head) -> None:
        """Keep in mind what a version names, whoever committed it."""
        self._sections[head.version] = head.sections
        kept = (KEPT_VERSIONS + 1) * self._run.settings.full_every + KEPT_VERSIONS
        self._sections.pop(head.version - kept, None)

    async def _obsolete_state(self, head: Head) -> set[str]:
        """Outer state that only the version before the last names; none unless all three records were found."""
        old, *newer = [await self._keys(head, head.version - back) for back in range(KEPT_VERSIONS, -1, -1)]
        return old[1].difference(*(keys[1] for keys in newer)) if all(any(keys) for keys in (old, *newer)) else set()

    async def _obsolete_parameters(self, head: Head) -> set[str]:
        """Parameters and changes from before the second newest whole version, if ``head`` is a whole one.

        None unless the record of every version since was found.
        """
        if not self._is_whole(head.fragment, head.version, head.sections):
            return set()
        first = await self._whole_before(head)
        if first is None:
            return set()
        kept: set[str] = set()
        for version in range(first, head.version + 1):
            kept |= (await self._keys(head, version))[0]
        gone: set[str] = set()
        for version in range(max(first - self._run.settings.full_every, self._swept_version + 1, 1), first):
            gone |= (await self._keys(head, version))[0]
        self._swept_version = first - 1
        return gone - kept - {section.key for section in self._run.manifest.theta}

    async def _whole_before(self, head: Head) -> int | None:
        """The newest whole version before the head; None if a record on the way was not found."""
        for version in range(head.version - 1, 0, -1):
            sections = await self._named(head.fragment, version)
            if not sections:
                return None
            if self._is_whole(head.fragment, version, sections):
                return version
        return 0

    def _is_whole(self, fragment: int, version: int, sections: Sequence[Section]) -> bool:
        return is_whole(version * self._run.fragments + fragment, sections)

    async def _keys(self, head: Head, version: int) -> tuple[set[str], set[str]]:
        """What a version names: parameters and changes, outer state. Both empty if its record was not found."""
        sections = await self._named(head.fragment, version)
        here = {section.key for section in sections if section.name in PARAMETERS}
        return here, {section.key for section in sections} - here

    async def _named(self, fragment: int, version: int) -> Sequence[Section]:
        """The sections of a version; empty if its record was not found this time."""
        if version == 0:
            return (self._run.manifest.theta[fragment],)
        if version < 0:
            return ()
        if version not in self._sections:
            state = await read_round(self._host.mailbox, self._run.id, version * self._run.fragments + fragment)
            if not isinstance(state, Decided):
                return ()
            self._sections[version] = state.record.sections
        return self._sections[version]

    async def _remove(self) -> None:
        """Remove what waits, a few at once; who begins to join meanwhile keeps the payloads that are still there."""
        while batch := self._removable():  # the task that lists must not stand still for long
            self._waiting.difference_update(batch)
            await asyncio.gather(*(self._host.mailbox.delete(key) for key in batch))

    def _removable(self) -> list[str]:
        if not self._waiting:
            return []
        pinned = self._board.joining()
        return nsmallest(REMOVED_AT_ONCE, (key for key in self._waiting if not (pinned and key.startswith(BLOBS))))


def is_whole(round: int, sections: Sequence[Section]) -> bool:
    """Whether a round has parameters of its own, and not only a change or what the version before named."""
    return any(section.name == "theta" and blob_round(section.key) == round for section in sections)


async def remove_orphans(host: Host, run: Run, board: Board) -> None:
    """Remove payloads that no version since the fragment's second newest whole one names, and that are older.

    They are what a crash between a payload and its record leaves, or between a commit and its sweep. One listing of
    ``blobs/`` in :data:`ORPHANS_EVERY` versions; nothing is removed while a node joins, or one of those records is
    not found.
    """
    if board.joining():
        return
    named: set[str] = set()
    for fragment, open_round in board.open_rounds.items():
        here = await named_since(host.mailbox, run.id, fragment, run.fragments, open_round // run.fragments - 1)
        if here is None:
            return
        named |= here
    keys = [entry.key async for entry in host.mailbox.list(BLOBS)]
    for key in keys:
        round = blob_round(key)
        if round is None or key in named or round < run.fragments or not is_blob_key(key):
            continue
        if round + KEPT_VERSIONS * run.fragments < board.open_rounds[round % run.fragments]:
            if board.joining():
                return
            await host.mailbox.delete(key)


async def named_since(mailbox: Mailbox, run: str, fragment: int, fragments: int, newest: int) -> set[str] | None:
    """Every payload that a fragment's versions name from the second newest whole one to ``newest``.

    None if one of their records was not found: then nothing is known to be needless.
    """
    named: set[str] = set()
    whole = 0
    for version in range(newest, 0, -1):
        round = version * fragments + fragment
        state = await read_round(mailbox, run, round)
        if not isinstance(state, Decided):
            return None
        named.update(section.key for section in state.record.sections)
        whole += is_whole(round, state.record.sections)
        if whole == KEPT_VERSIONS:
            break
    return named
