"""Fixed slices of the data, each held by one node at a time: ranks 0 to N - 1.

The holder of a rank is the lowest term whose node lives. So a rank whose node died is taken by the next term; and a
node that was only slow, or was restarted under its name, has its rank back as soon as it is seen alive, for all nodes
alike, while who took it learns that it lost it. A node holds one rank: terms it no longer stands for are removed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import RunWaited
from gradientmail_core.patterns.party import Party
from gradientmail_core.protocol.exchange import Won, bounded_get, create_once
from gradientmail_core.protocol.recipes import RankKey, parse_rank
from gradientmail_core.protocol.records import RECORD_LONGEST, Claim, parse_claim

RANKS_MOST = 9999
REPORT_SECONDS = 10.0


class Ranks:
    """The ranks of a run, as one node sees them."""

    def __init__(self, party: Party, count: int) -> None:
        if not 1 <= count <= RANKS_MOST:
            raise ConfigurationError(f"ranks is {count!r}.", f"Use 1 to {RANKS_MOST}.")
        party.check_claims("Ranks")
        self._party = party
        self._count = count
        self._takers: dict[RankKey, Claim | None] = {}
        self._first_seen: dict[RankKey, float] = {}

    async def take(self) -> RankKey:
        """A rank for this node: the one it holds already, else the lowest free one; waits while none is free."""
        report_at = self._party.clock.now()
        while True:
            terms = await self._terms()
            for rank in range(self._count):
                if self._holder(terms[rank]) == self._party.node:
                    return await self._only(rank, terms)
            for rank in range(self._count):
                if self._holder(terms[rank]) is None and (taken := await self._taken(rank, terms)) is not None:
                    return taken
            now = self._party.clock.now()
            if now >= report_at:
                self._party.emit(RunWaited(f"all {self._count} ranks are held: waiting for one"))
                report_at = now + REPORT_SECONDS
            await self._party.clock.sleep(self._party.period)

    async def holds(self, key: RankKey) -> bool:
        """Whether this node still holds the rank it took; if not, its term is removed."""
        if self._party.store == "racy":
            self._takers.pop(key, None)  # another's claim may have come over it, late
        terms = await self._terms()
        with_own = sorted({*terms[key.rank], key}, key=lambda each: each.term)  # a listing may lag
        if self._holder(with_own) == self._party.node:
            return True
        await self.drop(key)
        return False

    async def drop(self, key: RankKey) -> None:
        """Give the rank up."""
        self._takers.pop(key, None)
        await self._party.mailbox.delete(key.path)

    async def _only(self, rank: int, terms: Mapping[int, Sequence[RankKey]]) -> RankKey:
        """This node's term of ``rank``; those it has elsewhere, left by an earlier process, are removed."""
        own = [key for keys in terms.values() for key in keys if self._node(key) == self._party.node]
        kept = next(key for key in own if key.rank == rank)
        for key in own:
            if key != kept:
                await self.drop(key)
        return kept

    async def _taken(self, rank: int, terms: Mapping[int, Sequence[RankKey]]) -> RankKey | None:
        key = RankKey(rank, max((each.term for each in terms[rank]), default=-1) + 1)
        claim = self._party.claim()
        outcome = await create_once(self._party.mailbox, self._party.clock, key.path, claim.encoded())
        if not isinstance(outcome, Won):
            return None
        self._takers[key] = claim
        self._first_seen[key] = self._party.clock.now()
        return key if await self.holds(key) else None

    async def _terms(self) -> defaultdict[int, list[RankKey]]:
        """Every rank's terms, lowest first, with who took them read once each."""
        terms: defaultdict[int, list[RankKey]] = defaultdict(list)
        found = [parse_rank(entry.key) async for entry in self._party.mailbox.list("ranks/")]
        for key in sorted((key for key in found if key is not None), key=lambda key: (key.rank, key.term)):
            terms[key.rank].append(key)
            if key not in self._takers:
                body = await bounded_get(self._party.mailbox, key.path, RECORD_LONGEST) or b""
                claim = parse_claim(body, self._party.run)
                self._takers[key] = claim if isinstance(claim, Claim) else None
                self._first_seen[key] = self._party.clock.now()
        return terms

    def _node(self, key: RankKey) -> str | None:
        taker = self._takers.get(key)
        return taker.node if taker is not None else None

    def _holder(self, terms: Sequence[RankKey]) -> str | None:
        for key in terms:
            node = self._node(key)
            if node is not None and (node == self._party.node or self._party.alive(node, self._first_seen[key])):
                return node
        return None
