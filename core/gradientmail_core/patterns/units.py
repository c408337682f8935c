"""Units of work dealt through the mailbox, in blocks: the ledger of one queue as one node sees it.

A block is held by its highest claim, created once, so two living nodes never hold the same one (on a store whose
creates race they do so at worst for a while, and work twice). It may be claimed
anew when its holder is gone, or released it, saying how many units it had finished. A finished block is one record;
its claims are removed. Who finishes a block that was taken from it meanwhile has only worked twice: nothing is lost,
and every unit is worked on at least once.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.patterns.party import Party
from gradientmail_core.protocol.exchange import Won, bounded_get, create_once
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.recipes import (
    UNITS_MOST,
    UnitKey,
    UnitRecord,
    checked_name,
    parse_unit,
    parse_unit_record,
)
from gradientmail_core.protocol.records import RECORD_LONGEST, Claim, parse_claim

CLAIMS_MOST = 9999
FIRST_GAP_SECONDS = 0.5
GAP_GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class Block:
    """A block this node holds by claim ``number``: units ``first`` to ``last`` - 1, of which ``done`` are finished."""

    index: int
    number: int
    first: int
    last: int
    done: int = 0

    @property
    def units(self) -> range:
        """The units that remain."""
        return range(self.first + self.done, self.last)


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a block: its claims and releases by number (None: no record), when first seen, and its end."""

    claims: dict[int, Claim | None] = field(default_factory=dict)
    releases: dict[int, int] = field(default_factory=dict)
    seen: float = 0.0


class UnitLedger:
    """One queue of ``units`` numbered from 0, in blocks of ``block``."""

    def __init__(self, party: Party, name: str, units: int, block: int) -> None:
        if not (0 <= units <= UNITS_MOST and block >= 1):
            raise ConfigurationError(
                f"A queue of {units!r} units in blocks of {block!r} cannot be dealt.",
                f"Use 0 to {UNITS_MOST:,} units and blocks of 1 or more.",
            )
        party.check_claims("Units of a shared queue")
        self._party = party
        self._name = checked_name(name, "queue")
        self._units = units
        self._block = block
        self._standings: defaultdict[int, Standing] = defaultdict(lambda: Standing(seen=party.clock.now()))
        self._finished: set[int] = set()
        self._progress: dict[int, int] = {}

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self._units // self._block)

    @property
    def finished(self) -> bool:
        """True once every block is known to be finished."""
        return len(self._finished) >= self.blocks

    def came_so_far(self, progress: dict[int, int]) -> None:
        """Take over what an earlier process of this node had finished of its blocks."""
        self._progress = dict(progress)

    async def claim(self, *, wait: bool = True) -> Block | None:
        """The next block for this node; None once all are finished.

        While others hold all that is left this waits, or gives None at once without ``wait``.
        """
        gap = FIRST_GAP_SECONDS
        while True:
            await self.look()
            for index in range(self.blocks):
                if index not in self._finished and (block := await self._claimed(index)) is not None:
                    return block
            if self.finished or not wait:
                return None
            await self._party.clock.sleep(min(gap, self._party.period))
            gap *= GAP_GROWTH

    async def look(self) -> None:
        """Read what others wrote since the last time."""
        keys = [parse_unit(entry.key) async for entry in self._party.mailbox.list(f"units/{self._name}/")]
        known = [key for key in keys if key is not None]
        self._finished.update(key.block for key in known if key.word == "done" and key.block < self.blocks)
        for key in sorted((key for key in known if key.block not in self._finished), key=lambda key: key.path):
            await self._take_in(key)

    async def _take_in(self, key: UnitKey) -> None:
        standing = self._standings[key.block]
        match key.word:
            case "claim" if key.number not in standing.claims:
                standing.claims[key.number] = await self._holder(key)
            case "release" if key.number not in standing.releases:
                body = await bounded_get(self._party.mailbox, key.path, RECORD_LONGEST) or b""
                record = parse_unit_record(body, self._party.run)
                standing.releases[key.number] = 0 if isinstance(record, Rejected) else record.finished
            case _:
                pass

    async def _holder(self, key: UnitKey) -> Claim | None:
        body = await bounded_get(self._party.mailbox, key.path, RECORD_LONGEST) or b""
        claim = parse_claim(body, self._party.run)
        return claim if isinstance(claim, Claim) else None

    async def _claimed(self, index: int) -> Block | None:
        standing = self._standings[index]
        newest = max(standing.claims, default=-1)
        if newest >= CLAIMS_MOST or (newest >= 0 and self._held(standing, newest)):
            return None
        key = UnitKey(self._name, index, "claim", newest + 1)
        claim = self._party.claim()
        outcome = await create_once(self._party.mailbox, self._party.clock, key.path, claim.encoded())
        if not isinstance(outcome, Won):
            standing.claims[key.number] = await self._holder(key)
            return None
        standing.claims[key.number] = claim
        if await self._was_finished(index, key):
            return None
        first = index * self._block
        last = min(first + self._block, self._units)
        done = min(max(standing.releases.get(newest, 0), self._progress.pop(index, 0)), last - first)
        return Block(index, key.number, first, last, done)

    async def _was_finished(self, index: int, claimed: UnitKey) -> bool:
        """Whether the block was finished, and its claims removed, after it was last looked at."""
        done = UnitKey(self._name, index, "done")
        if await bounded_get(self._party.mailbox, done.path, RECORD_LONGEST) is None:
            return False
        self._finished.add(index)
        await self._party.mailbox.delete(claimed.path)
        return True

    def _held(self, standing: Standing, number: int) -> bool:
        holder = standing.claims[number]
        if holder is None or number in standing.releases or self._party.is_older_self(holder):
            return False
        return holder.node == self._party.node or self._party.alive(holder.node, standing.seen)

    async def finish(self, block: Block) -> None:
        """Record that a block is finished, and remove its claims."""
        record = UnitRecord(self._party.run, self._party.node, self._party.incarnation, block.last - block.first)
        done = UnitKey(self._name, block.index, "done")
        await create_once(self._party.mailbox, self._party.clock, done.path, record.encoded())
        self._finished.add(block.index)
        standing = self._standings.pop(block.index, Standing())
        words = [UnitKey(self._name, block.index, "claim", number) for number in standing.claims]
        words += [UnitKey(self._name, block.index, "release", number) for number in standing.releases]
        for key in words:
            await self._party.mailbox.delete(key.path)

    async def release(self, block: Block) -> None:
        """Give a block up, saying how many of its units are finished."""
        record = UnitRecord(self._party.run, self._party.node, self._party.incarnation, block.done)
        key = UnitKey(self._name, block.index, "release", block.number)
        await create_once(self._party.mailbox, self._party.clock, key.path, record.encoded())
        self._standings[block.index].releases[block.number] = block.done
