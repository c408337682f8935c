"""Where a node's tokens went: of each fragment, how many were merged, and how many were dropped and why.

A token is trained once and then stands, for each fragment, in exactly one place:

    processed  =  merged  +  in flight  +  carried  +  dropped

*In flight* are those of a snapshot whose round is open, *carried* those that the node's parameters hold and no
snapshot yet (an alignment may have carried them over a commit). Both follow from the learner's counters; what is
kept here is what was decided, so a step costs nothing. Every decision is one :class:`TokensBooked` event. Fragments
are aligned at different moments, so each has an account of its own, and a node's figure is their mean.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradientmail_core.events import TokensBooked
from gradientmail_core.protocol.fields import Fields
from gradientmail_core.protocol.records import RoundRecord

CAUSES_MOST = 64
NODES_MOST = 10_000
LATE = "late"
"""The snapshot was not in its round's record, nor refused there: the round closed before it arrived."""
OVERLAP = "overlap"
"""Trained after the snapshot and before its commit, and overwritten by it."""
UNPUBLISHED = "unpublished"
"""Trained since the last commit and overwritten by the next, without a snapshot in between."""
CLAMPED = "clamped"
"""Claimed beyond the run's bound of tokens per step."""
ROLLED_BACK = "rolled back"
"""Given up because this node's values were refused."""
RESTARTED = "restarted"
"""Trained before a checkpoint on a commit that others had left behind when it was loaded."""
LEFT = "left"
"""Trained after the last snapshot of a node that left."""

UNKNOWN = "unknown"
"""In a round whose list of participants could not be read."""
BEHIND = "too far behind"
"""Trained in a gossip round that the others had left behind."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Tokens of a fragment on which no round has decided: ``in_flight`` in a snapshot, ``carried`` in parameters."""

    in_flight: int = 0
    carried: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """What was decided of one fragment's tokens: ``merged``, and ``dropped`` by cause, in the order of causes."""

    merged: int = 0
    dropped: tuple[tuple[str, int], ...] = ()

    @property
    def dropped_tokens(self) -> int:
        """Dropped for whatever cause."""
        return sum(tokens for _, tokens in self.dropped)


EMPTY = Account()


def accounts(fragments: int) -> tuple[Account, ...]:
    """Empty accounts."""
    return (EMPTY,) * fragments


def decided(
    standing: Standing, *, merged: bool, counted: int | None, kept: int, cause: str | None
) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Of a fragment's ``standing`` tokens when a commit was written: how many are merged, and what was dropped why.

    ``merged`` says whether the snapshot in flight is in the record and ``counted`` what the record counts for it (None:
    all it claimed); ``kept`` tokens stay with the node, newest first; ``cause`` says why the rest was dropped, if it
    is known.
    """
    fresh = min(kept, standing.carried)
    flown = standing.in_flight - (kept - fresh)
    taken = min(flown if counted is None else counted, flown + standing.carried - fresh) if merged else 0
    beyond = max(taken - flown, 0)
    left = cause or (CLAMPED if merged else LATE)
    since = OVERLAP if standing.in_flight else cause or UNPUBLISHED
    losses = ((left, flown - (taken - beyond)), (since, standing.carried - fresh - beyond))
    return taken, tuple((name, tokens) for name, tokens in losses if tokens > 0)


def booked(account: Account, merged: int, dropped: Iterable[tuple[str, int]]) -> Account:
    """The account after a decision."""
    totals = dict(account.dropped)
    for cause, tokens in dropped:
        totals[cause] = totals.get(cause, 0) + tokens
    return replace(account, merged=account.merged + merged, dropped=tuple(sorted(totals.items())))


def accounts_json(books: Sequence[Account]) -> list[object]:
    """The accounts as plain JSON."""
    return [{"merged": account.merged, "dropped": dict(account.dropped)} for account in books]


def parse_account(fields: Fields) -> Account:
    """One of :func:`accounts_json`'s; raises FieldRefused for anything else."""
    dropped = fields.object("dropped")
    causes = sorted(fields.mapping("dropped"))[:CAUSES_MOST]
    return Account(fields.count("merged"), tuple((cause, dropped.count(cause)) for cause in causes))


@dataclass(frozen=True, slots=True)
class Tally:
    """What the rounds that this node saw say of every node: tokens merged, and snapshots refused by reason."""

    merged: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)


def tallied(tally: Tally, record: RoundRecord) -> Tally:
    """The tally after a round; of a flood of names no more than :data:`NODES_MOST` are kept."""
    merged, refused = dict(tally.merged), dict(tally.refused)
    for who in record.participants:
        if who.node in merged or len(merged) < NODES_MOST:
            merged[who.node] = merged.get(who.node, 0) + who.tokens
    for refusal in record.refusals:
        key = refusal.node, refusal.reason
        if key in refused or len(refused) < NODES_MOST:
            refused[key] = refused.get(key, 0) + 1
    return Tally(merged, refused)


@dataclass(frozen=True, slots=True)
class Books:
    """One fragment's tokens on this node, all of them."""

    processed: int
    merged: int
    in_flight: int
    carried: int
    dropped: Mapping[str, int]

    @property
    def dropped_tokens(self) -> int:
        """Dropped for whatever cause."""
        return sum(self.dropped.values())

    @property
    def balanced(self) -> bool:
        """Whether every processed token is in exactly one place."""
        return self.processed == self.merged + self.in_flight + self.carried + self.dropped_tokens


@dataclass(frozen=True, slots=True)
class Ledger:
    """A node's tokens (or samples) at one moment, as ``session.ledger`` gives it.

    ``fragments`` holds the exact books of each fragment; ``rounds`` the newest decisions, oldest first; ``nodes`` the
    tokens of every node that the rounds seen by this one merged, each fragment counting for itself; ``refused`` their
    refused snapshots by node and reason. The other figures are means over the fragments.
    """

    node: str
    fragments: tuple[Books, ...]
    rounds: tuple[TokensBooked, ...] = ()
    nodes: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def processed(self) -> int:
        """Tokens this node trained on."""
        return max((books.processed for books in self.fragments), default=0)

    @property
    def merged(self) -> float:
        """Of them, merged into the run's parameters."""
        return self._mean(books.merged for books in self.fragments)

    @property
    def in_flight(self) -> float:
        """In snapshots whose round is open."""
        return self._mean(books.in_flight for books in self.fragments)

    @property
    def carried(self) -> float:
        """In this node's parameters and no snapshot yet."""
        return self._mean(books.carried for books in self.fragments)

    @property
    def dropped(self) -> dict[str, float]:
        """Lost, by cause."""
        causes = sorted({cause for books in self.fragments for cause in books.dropped})
        return {cause: self._mean(books.dropped.get(cause, 0) for books in self.fragments) for cause in causes}

    @property
    def balanced(self) -> bool:
        """Whether every processed token of every fragment is in exactly one place."""
        return all(books.balanced for books in self.fragments)

    def _mean(self, numbers: Iterable[int]) -> float:
        return sum(numbers) / max(len(self.fragments), 1)

    def __str__(self) -> str:
        lost = ", ".join(f"{tokens:,.0f} {cause}" for cause, tokens in self.dropped.items()) or "none"
        return (
            f"{self.node}: {self.processed:,} tokens processed, {self.merged:,.0f} merged, "
            f"{self.in_flight:,.0f} in flight, {self.carried:,.0f} carried; dropped: {lost}"
        )
