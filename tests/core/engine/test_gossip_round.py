"""One round of one node; the other nodes are what the test writes into the mailbox."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from gradientmail_core.algorithms.gossip import Strengthen
from gradientmail_core.algorithms.mixing import All, Nothing, Pair, Peers
from gradientmail_core.engine.gossip_gathering import Pace
from gradientmail_core.engine.gossip_learner import Begun, Ended, Mean, Mixed
from gradientmail_core.engine.gossip_round import GossipRound
from gradientmail_core.engine.gossip_shares import (
    Means,
    encoded_mean,
    encoded_share,
    mean_values,
    opened_share,
    read_mean,
)
from gradientmail_core.events import ObjectIgnored
from gradientmail_core.protocol.gossip import MeanKey, MeanRecord, RosterKey, ShareKey
from tests.core.engine.gossip_parts import EXACT, live, roster, virtually

PAIRS = replace(EXACT, mix2=Pair(), mix1=Peers(2))


class Bench:
    """Round 3 of node ``a`` with others."""

    def __init__(self, place, here, nodes="ab", pace=None, **changes):
        self.place, self.here = place, here
        self.messages, self.hurried = [], []
        live(here.board, *nodes, tag=here.host.incarnation)
        self.vectors = tuple(np.full(layout.size, 3.0, np.float32) for layout in here.run.layouts)
        self.round = GossipRound(
            here,
            roster(here, 3, tuple(nodes), **changes),
            Begun(3, self.vectors, 20, 160, None),
            lambda: pace or Pace(),
            self.messages.append,
            self.hurried.append,
            lambda seconds: None,
        )
        self.task = None

    @classmethod
    async def of(cls, place, settings=EXACT, **options):
        return cls(place, await place.surroundings("a", settings), **options)

    def run(self):
        self.task = asyncio.ensure_future(self.round.run())

    async def give(self, node, kind, fill, fragment=None, stage=0):
        """Put a share in another node's name."""
        for layout in self.here.run.layouts:
            if fragment in (None, layout.fragment):
                key = ShareKey(3, kind, layout.fragment, node, stage)
                values = np.full(layout.size, fill, np.float32)
                base = self.here.means.newest(layout.fragment) if kind == "start" else None
                body = encoded_share(self.here.host, self.here.run, key, layout, values, base, (20, 100))
                await self.place.mailbox.put(key.path, body)

    async def exchanged(self, fill=1.0):
        started = self.place.loop.time()
        gradients = tuple(np.full(layout.size, fill, np.float32) for layout in self.here.run.layouts)
        outcome = await self.round.exchanged(Ended(3, gradients, 20, 160))
        return outcome, self.place.loop.time() - started

    def of_kind(self, kind):
        return {message.fragment: float(message.vector[0]) for message in self.messages if isinstance(message, kind)}

    async def end(self):
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


def test_an_averager_makes_the_mean_of_all_starts_with_its_spread_and_tokens():
    async def main(place):
        bench = await Bench.of(place, averagers=("a", "a"))
        bench.run()
        await bench.give("b", "start", 5.0)
        await asyncio.sleep(4.0)
        record = await read_mean(bench.here.host, bench.here.run, MeanKey(3, 0))
        await bench.end()
        return record, bench.of_kind(Mean), bench.of_kind(Mixed), bench.round.l2

    record, means, mixes, l2 = virtually(main)
    assert record.participants == ("a", "b") and record.tokens == 260
    assert means == mixes == {0: 4.0, 1: 4.0}
    assert l2 == pytest.approx(1.0)


def test_an_averager_does_without_a_start_that_does_not_come():
    async def main(place):
        bench = await Bench.of(place, averagers=("a", "a"), nodes="abc", pace=Pace(round=8.0))
        bench.run()
        await bench.give("b", "start", 5.0)
        await asyncio.sleep(7.0)
        await bench.end()
        return bench.of_kind(Mean)

    assert virtually(main) == {0: 4.0, 1: 4.0}


def test_a_dead_averager_costs_its_fragment_one_rounds_mixing():
    async def main(place):
        bench = await Bench.of(place, averagers=("a", "b"))
        bench.run()
        await bench.give("b", "start", 5.0)
        await asyncio.sleep(100.0)
        await bench.end()
        return bench.of_kind(Mixed)

    assert virtually(main) == {0: 4.0}


def test_a_node_that_leaves_makes_the_means_that_nobody_else_makes():
    async def main(place):
        bench = await Bench.of(place, averagers=("b", "b"))
        bench.round.leaving = True
        bench.run()
        await bench.give("b", "start", 5.0)
        await asyncio.sleep(60.0)
        await bench.end()
        return bench.of_kind(Mean)

    assert virtually(main) == {0: 4.0, 1: 4.0}


def test_a_node_that_leaves_sees_to_a_mean_in_full_that_its_dead_averager_left_as_a_change():
    async def main(place):
        bench = await Bench.of(place, averagers=("b", "b"))
        for layout in bench.here.run.layouts:
            base = bench.here.means.newest(layout.fragment)
            exact = np.full(layout.size, 4.0, np.float32)
            made = encoded_mean(bench.here.host, bench.here.run, 3, layout.fragment, exact, base, 9)
            await place.mailbox.put(made.change.key, made.change_body)
            record = MeanRecord(
                bench.here.run.id,
                3,
                layout.fragment,
                "b",
                "0f",
                ("a", "b"),
                made.mean.name,
                made.change,
                base.name,
                0.0,
                9,
            )
            await place.mailbox.create(MeanKey(3, layout.fragment).path, record.encoded())
        bench.run()
        await asyncio.sleep(5.0)
        await bench.round.duties_done()
        await bench.end()
        record = await read_mean(bench.here.host, bench.here.run, MeanKey(3, 1, full=True))
        return await mean_values(bench.here.host, bench.here.run, Means(), record)

    assert set(virtually(main).values) == {4.0}


def test_a_guest_gives_nothing_and_takes_the_means():
    async def main(place):
        bench = await Bench.of(place)
        other = replace(bench.here, host=replace(bench.here.host, incarnation="0c" * 8))
        guest = Bench(place, other)
        guest.round.roster = bench.round.roster
        guest.round.taking_part = False
        guest.run()
        bench.run()
        await bench.give("b", "start", 5.0)
        await asyncio.sleep(30.0)
        outcome, took = await guest.exchanged()
        await bench.end()
        await guest.end()
        return guest.of_kind(Mixed), outcome.partners, took

    mixes, partners, took = virtually(main)
    assert mixes == {0: 4.0} and partners == () and took == 0.0


def test_a_change_to_a_mean_that_a_newcomer_does_not_hold_is_no_fault():
    async def main(place):
        bench = await Bench.of(place)
        newcomer = Bench(place, replace(bench.here, means=Means()))
        newcomer.round.roster, newcomer.round.taking_part = bench.round.roster, False
        newcomer.run()
        bench.run()
        await bench.give("b", "start", 5.0)
        await asyncio.sleep(30.0)
        await bench.end()
        await newcomer.end()
        return newcomer.of_kind(Mixed), place.events(ObjectIgnored)

    mixes, ignored = virtually(main)
    assert mixes == {0: 4.0} and not ignored


def test_partial_mix1_averages_over_peers_without_any_averager():
    async def main(place):
        bench = await Bench.of(place, PAIRS, nodes="abc", mean=False)
        bench.run()
        await bench.give("b", "start", 5.0)
        await bench.give("c", "start", 7.0)
        await asyncio.sleep(10.0)
        await bench.end()
        return bench.of_kind(Mixed), bench.of_kind(Mean)

    assert virtually(main) == ({0: 5.0, 1: 5.0}, {})


def test_rounds_of_mix1_go_on_from_what_was_mixed():
    async def main(place):
        bench = await Bench.of(place, replace(PAIRS, rounds=2), mean=False)
        bench.run()
        await bench.give("b", "start", 5.0)
        await bench.give("b", "start", 6.0, stage=1)
        await asyncio.sleep(10.0)
        await bench.end()
        return bench.of_kind(Mixed)

    assert virtually(main) == {0: 5.0, 1: 5.0}


def test_a_pair_takes_the_mean_of_both_gradients():
    async def main(place):
        bench = await Bench.of(place, PAIRS)
        await bench.give("b", "grad", 4.0)
        outcome, took = await bench.exchanged(1.0)
        return outcome, took

    outcome, took = virtually(main)
    assert {float(value) for gradient in outcome.gradients for value in gradient} == {2.5}
    assert outcome.partners == ("b",) and took < 1.0


def test_both_of_a_pair_get_the_same_bytes_whatever_the_codec():
    async def main(place):
        settings = replace(PAIRS, delta_codec="INT4")
        bench = await Bench.of(place, settings)
        layout = bench.here.run.layouts[0]
        dice = np.random.default_rng(0)
        mine, theirs = (dice.standard_normal(layout.size).astype(np.float32) for _ in range(2))
        key = ShareKey(3, "grad", 0, "b")
        body = encoded_share(bench.here.host, bench.here.run, key, layout, theirs, None, (20, 160))
        await place.mailbox.put(key.path, body)
        await bench.give("b", "grad", 0.0, fragment=1)
        gradients = (mine.copy(), np.zeros(bench.here.run.layouts[1].size, np.float32))
        outcome = await bench.round.exchanged(Ended(3, gradients, 20, 160))
        own = await place.mailbox.get(ShareKey(3, "grad", 0, "a").path)
        decoded = []
        for node, sent in (("a", own), ("b", body)):
            vector = opened_share(bench.here.run, bench.here.means, replace(key, node=node), layout, None, sent)
            decoded.append(np.empty(layout.size, np.float32))
            vector.decode(0, layout.size, decoded[-1])
        return outcome.gradients[0], decoded

    mixed, (one, other) = virtually(main)
    assert mixed.tobytes() == ((one.astype(np.float64) + other) / 2).astype(np.float32).tobytes()


def test_a_partner_that_never_answers_costs_the_timeout_and_the_own_gradient_counts():
    async def main(place):
        bench = await Bench.of(place, PAIRS)
        return await bench.exchanged(1.0)

    outcome, took = virtually(main)
    assert {float(value) for gradient in outcome.gradients for value in gradient} == {1.0}
    assert outcome.partners == () and took <= PAIRS.timeout + 0.01


def test_a_store_that_does_not_answer_costs_the_timeout_too():
    async def main(place):
        here = await place.surroundings("a", PAIRS)

        class Silent(type(place.mailbox)):
            async def put(self, key, body):
                await asyncio.sleep(1e6)

        host = replace(here.host, mailbox=Silent("silent"))
        bench = Bench(place, replace(here, host=host))
        return await bench.exchanged(1.0)

    outcome, took = virtually(main)
    assert outcome.partners == () and took <= PAIRS.timeout + 0.01


@pytest.mark.parametrize("averager", ["a", "b"])
def test_gradients_over_all_come_from_the_fragments_averager(averager):
    async def main(place):
        bench = await Bench.of(place, averagers=(averager, averager))
        await bench.give("b", "grad", 4.0)
        if averager == "b":
            await bench.give("b", "mix2", 2.5)
        return await bench.exchanged(1.0)

    outcome, took = virtually(main)
    assert {float(value) for gradient in outcome.gradients for value in gradient} == {2.5} and took < 1.0


def test_only_the_chosen_tensors_are_mixed():
    async def main(place):
        bench = await Bench.of(place, replace(PAIRS, mix2_on=("@blocks:4",)))
        for chosen in bench.here.run.subsets:
            key = ShareKey(3, "grad", chosen.layout.fragment, "b")
            values = np.full(chosen.layout.size, 4.0, np.float32)
            body = encoded_share(bench.here.host, bench.here.run, key, chosen.layout, values, None, (20, 160))
            await place.mailbox.put(key.path, body)
        outcome, _ = await bench.exchanged(1.0)
        named = {}
        for layout, gradient in zip(bench.here.run.layouts, outcome.gradients, strict=True):
            for piece in layout.pieces:
                named[piece.name] = float(gradient[piece.offset])
        return named

    named = virtually(main)
    assert {name for name, value in named.items() if value == 2.5} == {f"block.{n}.weight" for n in range(4)}
    assert set(named.values()) == {1.0, 2.5}


def test_a_strengthened_round_mixes_all_gradients_over_all():
    async def main(place):
        settings = replace(EXACT, mix2=Nothing(), strengthen=Strengthen(0.1))
        bench = await Bench.of(place, settings, strong=True, averagers=("a", "a"))
        await bench.give("b", "grad", 4.0)
        return await bench.exchanged(1.0), bench.round.mix2

    (outcome, _), mix2 = virtually(main)
    assert mix2 == All() and {float(value) for gradient in outcome.gradients for value in gradient} == {2.5}


@pytest.mark.parametrize("sign", ["roster", "gradient"])
def test_a_node_that_is_waited_for_is_hurried(sign):
    async def main(place):
        bench = await Bench.of(place, replace(PAIRS, follow=True))
        bench.run()
        await asyncio.sleep(6.0)
        assert not bench.hurried
        if sign == "roster":
            await place.mailbox.create(RosterKey(4).path, roster(bench.here, 4, ("a", "b")).encoded())
        else:
            await bench.give("b", "grad", 1.0)
        await asyncio.sleep(6.0)
        await bench.end()
        return bench.hurried

    assert virtually(main) == [3]
