"""Which of the nodes that may train or close does the closing: an election by create-once terms.

A node of role ``either`` stands for the office while no syncer lives and somebody else trains: it creates
``syncer/{term}`` after the highest term there is. The first create wins, so there is one winner; it stops training and
says so in its lease. A term counts while its holder serves, or was only just elected. The winner trains again once
another syncer lives, unless that one holds an older term, or once nobody else trains.

Nothing depends on there being one syncer: two only share the closing, and records decide every round as ever.
"""

from gradientmail_core.engine.run import Board, Host, Run
from gradientmail_core.protocol.exchange import Won, bounded_get, create_once
from gradientmail_core.protocol.keys import SYNCERS, LeaseState, parse_term, term_key
from gradientmail_core.protocol.leases import is_alive
from gradientmail_core.protocol.records import RECORD_LONGEST, Claim, parse_claim

TERMS_READ = 8
WORKING: frozenset[LeaseState] = frozenset({"t", "w", "e", "l", "v", "p"})


class Office:
    """The office of syncer, as a node sees it that may hold it."""

    def __init__(self, host: Host, run: Run, board: Board) -> None:
        self._host = host
        self._run = run
        self._board = board
        self._term: int | None = None
        self._claims: dict[int, Claim | None] = {}
        self._first_seen: dict[int, float] = {}

    async def holds(self) -> bool:
        """Whether this node is to serve from now on; asks the store only when that may change."""
        if self._run.manifest.store == "none" or self._board.leaving:
            self._term = None
        elif self._term is not None:
            self._term = None if await self._relieved(self._term) else self._term
        elif self._others(WORKING) and not self._others(frozenset({"s"})):
            self._term = await self._elected()
        return self._term is not None

    def _others(self, states: frozenset[LeaseState]) -> set[str]:
        """Other living nodes in one of these states."""
        now, timeouts = self._host.clock.now(), self._host.timeouts
        return {
            node
            for node, presence in self._board.roster.nodes.items()
            if node != self._host.node and presence.lease.state in states and is_alive(presence, now, timeouts)
        }

    async def _relieved(self, term: int) -> bool:
        """True once nobody else trains, or another syncer lives that is no earlier winner."""
        others = self._others(frozenset({"s"}))
        if not others or not self._others(WORKING):
            return not self._others(WORKING)
        await self._read_terms()
        earlier = {claim.node for number, claim in self._claims.items() if claim is not None and number < term}
        return bool(others - earlier)

    async def _elected(self) -> int | None:
        """The term this node has won, if it has."""
        newest = await self._read_terms()
        if newest is not None and self._stands(newest):
            return None
        term = 0 if newest is None else newest + 1
        claim = Claim(self._run.id, self._host.node, self._host.incarnation, self._host.nonce())
        outcome = await create_once(self._host.mailbox, self._host.clock, term_key(term), claim.encoded())
        if isinstance(outcome, Won):
            self._seen(term, claim)
            return term
        self._seen(term, _claim(outcome.body, self._run.id))
        return None

    def _stands(self, term: int) -> bool:
        """Whether the winner of a term may still begin to serve: it lives, and has not had long for that."""
        claim, since = self._claims[term], self._first_seen[term]
        if claim is None or claim.node == self._host.node:
            return False
        fresh = self._host.clock.now() - since < self._host.timeouts.lease
        return fresh and self._board.may_live(claim.node, since)

    async def _read_terms(self) -> int | None:
        """Read the newest terms that are not known yet; the highest of them."""
        listed = [parse_term(entry.key) async for entry in self._host.mailbox.list(SYNCERS)]
        terms = sorted({term for term in listed if term is not None} | self._claims.keys())
        for term in terms[-TERMS_READ:]:
            if term not in self._claims:
                body = await bounded_get(self._host.mailbox, term_key(term), RECORD_LONGEST)
                if body is not None:
                    self._seen(term, _claim(body, self._run.id))
        return terms[-1] if terms and terms[-1] in self._claims else None

    def _seen(self, term: int, claim: Claim | None) -> None:
        self._claims[term] = claim
        self._first_seen[term] = self._host.clock.now()


def _claim(body: bytes | bytearray | memoryview, run: str) -> Claim | None:
    claim = parse_claim(bytes(body), run)
    return claim if isinstance(claim, Claim) else None
