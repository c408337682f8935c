"""One round as a node lives it: give its start, average what it averages, gather Mix1, exchange Mix2.

Everything but :meth:`GossipRound.exchanged` runs beside training. A round never waits for one that is slower than
its deadlines, and nothing a later round needs is lost with an earlier one: whoever misses a mean trains on from its
own start, and the next mean brings it back.

The mean over all nodes is made once a fragment by its averager. A node that leaves cannot rely on others' haste, so
it makes whatever mean is missing itself, a little later than the averager would; the record is created once, and
both go on from the one that was first.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gradientmail_core.algorithms.gossip import Selection
from gradientmail_core.algorithms.mixing import All, Mix, Nothing, mean_of, partners, spread_about
from gradientmail_core.clock import TimeOver
from gradientmail_core.engine.gossip_gathering import (
    FIRST_PAUSE_SECONDS,
    PAUSE_GROWTH,
    Pace,
    Surroundings,
    Wanted,
    gathered,
    refresh_leases,
)
from gradientmail_core.engine.gossip_learner import Begun, Ended, Mean, Message, Mixed
from gradientmail_core.engine.gossip_roster import read_roster
from gradientmail_core.engine.gossip_shares import (
    EncodedMean,
    MeanValues,
    Vector,
    encoded_full,
    encoded_mean,
    encoded_share,
    mean_values,
    opened_share,
    read_mean,
)
from gradientmail_core.engine.run import Bell
from gradientmail_core.mailbox.base import Body
from gradientmail_core.protocol.exchange import Outcome, Won, create_once
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.gossip import Blob, Kind, MeanKey, MeanRecord, RosterRecord, ShareKey
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Piece

FOLLOWED_FROM = 0.5
FOLLOW_SECONDS = 1.0
GATHERED_WITHIN = 0.6
MIX2_AVERAGED_WITHIN = 0.5
TAKEN_OVER_AFTER = 0.5
EXPECTED_EARLY = 0.8
EXPECTED_AFTER = 0.5
STARTS_AT_ONCE = 2


@dataclass(frozen=True, slots=True, eq=False)
class Exchanged:
    """The outcome of Mix2: the gradients, and whose are in them besides this node's."""

    gradients: tuple[Flat, ...]
    partners: tuple[str, ...]


class GossipRound:
    """A round of this node with its roster. ``deliver`` and ``hurry`` lead to the learner.

    ``mixed`` is set once Mix1 of every fragment was delivered; ``leaving`` is set from outside.
    """

    def __init__(
        self,
        here: Surroundings,
        roster: RosterRecord,
        begun: Begun,
        pace: Callable[[], Pace],
        deliver: Callable[[Message], None],
        hurry: Callable[[int], None],
        mean_seen: Callable[[float], None],
    ) -> None:
        self._here = here
        self._host = here.host
        self._run = here.run
        self._pace = pace
        self._deliver = deliver
        self._hurry = hurry
        self._mean_seen = mean_seen
        self._begun = begun
        self.roster = roster
        self.number = roster.round
        self.started = here.host.clock.now()
        self._incarnations = {member.node: member.incarnation for member in roster.members}
        self.taking_part = self._incarnations.get(here.host.node) == here.host.incarnation
        self._own: dict[ShareKey, Vector | None] = {}
        self._encoded = asyncio.Event()
        self._averaging: set[int] = set()
        self._made: set[int] = set()
        self._taken_records: dict[int, MeanRecord] = {}
        self._bells = {layout.fragment: Bell() for layout in here.run.layouts}
        self._spreads: dict[int, float] = {}
        self._unmixed = {layout.fragment for layout in here.run.layouts}
        self.mixed = asyncio.Event()
        self.leaving = False

    # -- what the roster says ------------------------------------------------------------------------------

    @property
    def _me(self) -> str:
        return self._host.node

    @property
    def mix2(self) -> Mix:
        """How gradients are mixed in this round."""
        return All() if self.roster.strong else self._run.settings.mix2

    @property
    def _selections(self) -> tuple[Selection | None, ...]:
        return self._run.wholes if self.roster.strong else self._run.subsets

    @property
    def waits(self) -> bool:
        """True if Mix2 has anybody to wait for."""
        return self.taking_part and not isinstance(self.mix2, Nothing) and len(self.roster.active) > 1

    @property
    def l2(self) -> float | None:
        """The nodes' root mean square distance from their mean, a parameter; None until all means are here."""
        if len(self._spreads) < len(self._run.layouts):
            return None
        return math.sqrt(sum(self._spreads.values()) / self._run.elements)

    @property
    def outputs_shape(self) -> tuple[int, ...] | None:
        """The shape of the probe's outputs in this round; None if it was not asked."""
        return None if self._begun.outputs is None else self._begun.outputs.shape

    def _stages(self, mix: Mix) -> int:
        return 1 if isinstance(mix, All | Nothing) else self._run.settings.rounds

    def _partners(self, mix: Mix, stage: int) -> tuple[str, ...]:
        return partners(mix, self._me, self.roster.active, self.roster.seed, stage)

    # -- beside training -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Give the start and gather Mix1 until all of it is here; follow the others meanwhile."""
        duties: list[asyncio.Future[None]] = []
        try:
            if self.taking_part:
                duties.append(asyncio.ensure_future(self._publish_start()))
                duties += [asyncio.ensure_future(self._duty(fragment)) for fragment in self._averaged()]
                if not isinstance(self._run.settings.mix1, All | Nothing):
                    duties += [asyncio.ensure_future(self._mix_locally(layout.fragment)) for layout in self._run.wires]
            duties += [asyncio.ensure_future(self._collect(layout.fragment)) for layout in self._run.wires]
            if self._run.settings.follow:
                duties.append(asyncio.ensure_future(self._follow()))
            await asyncio.gather(*duties)
        finally:
            for duty in duties:
                duty.cancel()

    async def duties_done(self) -> None:
        """Until everything this node began to average is made, and the means it took are there in full."""
        await asyncio.gather(*(self._seen_to_in_full(record) for record in self._taken_records.values()))
        while self._made < self._averaging:
            await self._host.clock.sleep(FIRST_PAUSE_SECONDS)

    def _averaged(self) -> list[int]:
        return [p for p, node in enumerate(self.roster.averagers) if node == self._me and self.roster.mean]

    async def _duty(self, fragment: int) -> None:
        pace = self._pace()
        patience = self._run.settings.timeout if pace.round is None else GATHERED_WITHIN * pace.round
        await self._average(fragment, patience)

    async def _publish_start(self) -> None:
        """Every fragment's start, each node beginning with another one, so that all averagers are busy at once."""
        members = sorted(self._incarnations)
        first = members.index(self._me) * len(self._run.wires) // len(members)
        waiting = [*self._run.wires[first:], *self._run.wires[:first]][::-1]

        async def give() -> None:
            while waiting:
                await self._give_start(waiting.pop())

        await asyncio.gather(*(give() for _ in range(STARTS_AT_ONCE)), self._publish_outputs())

    async def _give_start(self, wire: FragmentLayout) -> None:
        fragment = wire.fragment
        await self._give("start", 0, wire, self._begun.vectors[fragment], self._here.means.newest(fragment))

    async def _publish_outputs(self) -> None:
        outputs = self._begun.outputs
        if outputs is not None:
            key = ShareKey(self.number, "probe", 0, self._me)
            layout = probe_layout(outputs.shape)
            body = encoded_share(self._host, self._run, key, layout, outputs.reshape(-1), None, (0, 0))
            await self._host.mailbox.put(key.path, body)

    async def _give(
        self, kind: Kind, stage: int, layout: FragmentLayout, values: Flat, base: MeanValues | None
    ) -> None:
        """Publish a share; it counts as this node's own from the moment it is encoded."""
        key = ShareKey(self.number, kind, layout.fragment, self._me, stage)
        counts = (self._begun.steps, self._begun.tokens)

        def encoded() -> tuple[bytearray, Vector | Rejected | str]:
            body = encoded_share(self._host, self._run, key, layout, values, base, counts)
            return body, opened_share(self._run, self._here.means, key, layout, self._host.incarnation, body)

        body, own = await self._host.clock.compute(encoded)
        self._own[key] = own if isinstance(own, Vector) else None
        self._encoded.set()
        await self._host.mailbox.put(key.path, body)

    async def _own_share(self, kind: Kind, stage: int, fragment: int) -> Vector | None:
        """This node's share as the others see it, once it is encoded; None if they would refuse it."""
        key = ShareKey(self.number, kind, fragment, self._me, stage)
        while key not in self._own:
            self._encoded.clear()
            await self._encoded.wait()
        return self._own[key]

    async def _gathered(
        self, kind: Kind, stage: int, layout: FragmentLayout, nodes: tuple[str, ...], seconds: float
    ) -> dict[str, Vector]:
        keys = {node: ShareKey(self.number, kind, layout.fragment, node, stage) for node in nodes if node != self._me}
        wanted = Wanted(keys, layout, self._incarnations, self.roster.active)
        return await gathered(self._here, wanted, seconds, self._pace())

    # -- Mix1 ----------------------------------------------------------------------------------------------

    async def _average(self, fragment: int, patience: float) -> None:
        """Make the mean of a fragment's starts from those that come within ``patience``, unless it is made already."""
        if fragment in self._averaging:
            return
        self._averaging.add(fragment)
        wire, size = self._run.wires[fragment], self._run.layouts[fragment].size
        own = await self._own_share("start", 0, fragment)
        members = tuple(member.node for member in self.roster.members)
        found = await self._gathered("start", 0, wire, members, patience)
        if own is not None:
            found[self._me] = own
        if not found:
            return
        nodes = tuple(sorted(found))
        vectors = [found[node].decode for node in nodes]
        base = self._here.means.newest(fragment)
        assert base is not None, "a node joins with a mean of every fragment"
        tokens = sum(vector.tokens for vector in found.values()) + base.tokens

        def made() -> tuple[EncodedMean, float]:
            mean = np.empty(wire.size, np.float32)
            mean_of(vectors, mean)
            encoded = encoded_mean(self._host, self._run, self.number, fragment, mean, base, tokens)
            return encoded, spread_about(vectors, encoded.mean.values, size)

        encoded, spread = await self._host.clock.compute(made)
        await self._host.mailbox.put(encoded.change.key, encoded.change_body)
        record = MeanRecord(
            run=self._run.id,
            round=self.number,
            fragment=fragment,
            node=self._me,
            nonce=self._host.nonce(),
            participants=nodes,
            name=encoded.mean.name,
            payload=encoded.change,
            base=base.name,
            spread=spread,
            tokens=tokens,
        )
        outcome = await self._create(MeanKey(self.number, fragment), record)
        self._bells[fragment].ring()
        if isinstance(outcome, Won):
            await self._put_in_full(record, encoded.full, encoded.full_body)
        self._made.add(fragment)

    async def _create(self, key: MeanKey, record: MeanRecord) -> Outcome:
        return await create_once(self._host.mailbox, self._host.clock, key.path, record.encoded())

    async def _put_in_full(self, record: MeanRecord, payload: Blob, body: Body) -> None:
        """The same mean for those who do not hold its base: payload first, then its record."""
        await self._host.mailbox.put(payload.key, body)
        whole = replace(record, node=self._me, nonce=self._host.nonce(), payload=payload, base=None)
        await self._create(MeanKey(self.number, record.fragment, full=True), whole)

    async def _collect(self, fragment: int) -> None:
        """Fetch a fragment's mean when it is there. A node that leaves makes it, if nobody else does."""
        pace = self._pace()
        if self.roster.mean and pace.mean is not None and fragment not in self._averaged():
            soonest = pace.mean if pace.round is None else min(pace.mean, EXPECTED_AFTER * pace.round)
            await self._host.clock.sleep(EXPECTED_EARLY * soonest)
        pause, left, told = FIRST_PAUSE_SECONDS, None, False
        while not self.roster.mean and not self.leaving:
            await self._host.clock.sleep(self._pace().pause_most)
        while True:
            record = await read_mean(self._host, self._run, MeanKey(self.number, fragment))
            if isinstance(record, MeanRecord) and not told:
                self._mean_seen(self._host.clock.now() - self.started)
                told = True
            if isinstance(record, MeanRecord) and await self._taken(record):
                self._taken_records[fragment] = record
                return
            if record is not None:
                whole = await read_mean(self._host, self._run, MeanKey(self.number, fragment, full=True))
                if isinstance(whole, MeanRecord) and await self._taken(whole):
                    return
            now = self._host.clock.now()
            if self.leaving and self.taking_part:
                left = now if left is None else left
                await refresh_leases(self._here, now - left)
                if record is None and now >= left + self._patience(fragment):
                    await self._average(fragment, self._run.settings.timeout)
            await self._bells[fragment].wait(self._host.clock, self._host.jitter(pause))
            pause = min(pause * PAUSE_GROWTH, self._pace().pause_most)

    async def _seen_to_in_full(self, record: MeanRecord) -> None:
        """A node that leaves sees to it that its last mean is there in full for those who come later."""
        key, pause = MeanKey(self.number, record.fragment, full=True), FIRST_PAUSE_SECONDS
        mine_after = self._host.clock.now() + self._patience(record.fragment)
        while await read_mean(self._host, self._run, key) is None:
            mean = self._here.means.named(record.fragment, record.name)
            if mean is not None and self._host.clock.now() >= mine_after:
                payload, body = encoded_full(self._host, self._run, mean)
                await self._put_in_full(record, payload, body)
            await self._host.clock.sleep(self._host.jitter(pause))
            pause = min(pause * PAUSE_GROWTH, self._pace().pause_most)

    def _patience(self, fragment: int) -> float:
        """How long a node that leaves gives the averager of a fragment."""
        averager = self.roster.averagers[fragment]
        if not self.roster.mean or self._here.board.gone(averager, self.started) is not None:
            return 0.0
        pace = self._pace()
        return self._run.settings.timeout + (0.0 if pace.round is None else TAKEN_OVER_AFTER * pace.round)

    async def _taken(self, record: MeanRecord) -> bool:
        """Take in what a record names; False where that cannot be read, or is a change to a mean that is not here."""
        if record.base is not None and self._here.means.named(record.fragment, record.base) is None:
            return False
        mean = await mean_values(self._host, self._run, self._here.means, record)
        if isinstance(mean, Rejected):
            self._here.board.ignored(record.payload.key, mean.reason)
            return False
        self._here.means.keep(mean)
        self._spreads[record.fragment] = record.spread
        self._here.board.evident(record.participants)
        self._deliver(Mean(self.number, record.fragment, mean.values))
        if isinstance(self._run.settings.mix1, All):
            self._deliver(Mixed(self.number, record.fragment, mean.values))
            self._is_mixed(record.fragment)
        return True

    def _is_mixed(self, fragment: int) -> None:
        self._unmixed.discard(fragment)
        if not self._unmixed:
            self.mixed.set()

    async def _mix_locally(self, fragment: int) -> None:
        """Mix1 with some peers: gather, average, and again for each further stage."""
        wire, mix = self._run.wires[fragment], self._run.settings.mix1
        patience = self._run.settings.timeout if (pace := self._pace()).round is None else pace.round
        own = await self._own_share("start", 0, fragment)
        for stage in range(self._stages(mix)):
            found = await self._gathered("start", stage, wire, self._partners(mix, stage), patience)
            mixed = await self._mean(wire, own, found)
            self._deliver(Mixed(self.number, fragment, mixed))
            if stage + 1 < self._stages(mix):
                await self._give("start", stage + 1, wire, mixed, self._here.means.newest(fragment))
                own = await self._own_share("start", stage + 1, fragment)
        self._is_mixed(fragment)

    async def _mean(self, layout: FragmentLayout, own: Vector | None, found: dict[str, Vector]) -> Flat:
        """The mean of what was found and this node's own share, in node order."""
        row = found if own is None else found | {self._me: own}
        vectors = [row[node].decode for node in sorted(row)]
        mixed = np.zeros(layout.size, np.float32)
        if vectors:
            await self._host.clock.compute(lambda: mean_of(vectors, mixed))
        return mixed

    # -- following -----------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Hurry the learner when the others have gone on, or a partner waits for it."""
        pace = self._pace()
        period = FOLLOW_SECONDS if pace.round is None else pace.pause_most
        if not isinstance(await read_roster(self._host, self._run, self.number + 1), RosterRecord):
            await self._host.clock.sleep(0.0 if pace.round is None else FOLLOWED_FROM * pace.round)
            while not await self._is_waited_for():
                await self._host.clock.sleep(self._host.jitter(period))
        self._hurry(self.number)

    async def _is_waited_for(self) -> bool:
        if isinstance(await read_roster(self._host, self._run, self.number + 1), RosterRecord):
            return True
        if not self.waits:
            return False
        others = [self.roster.node] if isinstance(self.mix2, All) else self._partners(self.mix2, 0)
        fragment = next((s.layout.fragment for s in self._selections if s is not None), None)
        for node in others:
            if node != self._me and fragment is not None:
                key = ShareKey(self.number, "grad", fragment, node).path
                async for entry in self._host.mailbox.list(key):
                    if entry.key == key:
                        return True
        return False

    # -- Mix2 ----------------------------------------------------------------------------------------------

    async def exchanged(self, ended: Ended) -> Exchanged:
        """The gradients after Mix2; a node's own where nobody answers.

        Waits for the settings' time at most, and no longer than it takes the others to end another round: a node held
        up by one that died does not fall behind so far that it must start anew.
        """
        answered: list[str] = []
        if self.waits:
            mixing = [
                asyncio.ensure_future(self._exchange(chosen, ended.gradients[fragment], answered))
                for fragment, chosen in enumerate(self._selections)
                if chosen is not None
            ]
            watching = asyncio.ensure_future(self._left_behind())
            mixed = asyncio.gather(*mixing)
            try:
                await asyncio.wait((mixed, watching), return_when=asyncio.FIRST_COMPLETED)
            finally:
                mixed.cancel()
                watching.cancel()
                outcomes = await asyncio.gather(mixed, watching, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
        return Exchanged(ended.gradients, tuple(sorted(set(answered))))

    async def _left_behind(self) -> None:
        """Until the others have ended the next round too."""
        while not isinstance(await read_roster(self._host, self._run, self.number + 2), RosterRecord):
            await self._host.clock.sleep(self._pace().pause_most)

    async def _exchange(self, chosen: Selection, gradient: Flat, answered: list[str]) -> None:
        """Mix one fragment's gradient in place, and note whose are in it."""
        values = np.concatenate([gradient[start:stop] for start, stop in chosen.spans])

        async def mixing() -> None:
            if isinstance(self.mix2, All):
                await self._mix_gradient_over_all(chosen.layout, values, gradient, chosen, answered)
            else:
                await self._mix_gradient_locally(chosen.layout, values, gradient, chosen, answered)

        with contextlib.suppress(TimeOver):
            await self._host.clock.within(self._run.settings.timeout, mixing())

    async def _mix_gradient_locally(
        self, layout: FragmentLayout, values: Flat, gradient: Flat, chosen: Selection, answered: list[str]
    ) -> None:
        for stage in range(self._stages(self.mix2)):
            giving = asyncio.ensure_future(self._give("grad", stage, layout, values, None))
            try:
                own = await self._own_share("grad", stage, layout.fragment)
                nodes = self._partners(self.mix2, stage)
                found = await self._gathered("grad", stage, layout, nodes, self._run.settings.timeout)
                values = await self._mean(layout, own, found)
                _put_back(gradient, chosen, values)
                answered.extend(found)
                await giving
            finally:
                giving.cancel()

    async def _mix_gradient_over_all(
        self, layout: FragmentLayout, values: Flat, gradient: Flat, chosen: Selection, answered: list[str]
    ) -> None:
        averager = self.roster.averagers[layout.fragment]
        giving = asyncio.ensure_future(self._give("grad", 0, layout, values, None))
        try:
            if averager == self._me:
                await self._average_gradients(layout)
            key = ShareKey(self.number, "mix2", layout.fragment, averager)
            wanted = Wanted({averager: key}, layout, self._incarnations, (averager,))
            found = await gathered(self._here, wanted, self._run.settings.timeout, self._pace())
            if averager in found:
                await self._host.clock.compute(lambda: mean_of([found[averager].decode], values))
                _put_back(gradient, chosen, values)
                answered.extend(node for node in self.roster.active if node != self._me)
            await giving
        finally:
            giving.cancel()

    async def _average_gradients(self, layout: FragmentLayout) -> None:
        own = await self._own_share("grad", 0, layout.fragment)
        patience = MIX2_AVERAGED_WITHIN * self._run.settings.timeout
        found = await self._gathered("grad", 0, layout, self.roster.active, patience)
        mean = await self._mean(layout, own, found)
        await self._give("mix2", 0, layout, mean, None)


def _put_back(gradient: Flat, chosen: Selection, values: Flat) -> None:
    offset = 0
    for start, stop in chosen.spans:
        gradient[start:stop] = values[offset : offset + stop - start]
        offset += stop - start


def probe_layout(shape: tuple[int, ...]) -> FragmentLayout:
    """The layout of a probe's outputs."""
    return FragmentLayout(0, (Piece("outputs", tuple(shape), 0),))
