"""Gossip nodes together on virtual time: joining, leaving, dying, lagging, being cut off."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from gradientmail_core.algorithms.gossip import FactoredGossip, Strengthen
from gradientmail_core.algorithms.mixing import All, Nothing, Pair, Peers
from gradientmail_core.errors import RunMismatch
from gradientmail_core.events import Disagreement, Rejoined, RoundMixed
from gradientmail_core.protocol.gossip import RosterKey
from gradientmail_core.sim.gossip import Bowl
from tests.core.engine.gossip_parts import EXACT, TIMEOUTS, virtually

QUICK = FactoredGossip(sync_every=10, fragments=2, mix2=Pair(), timeout=3.0)


def spread(nodes):
    """The largest distance of a node's parameters from the bottom of the bowl."""
    return max(float(np.abs(node.model.flat() - 1.0).max()) for node in nodes)


def ended_rounds(place, name):
    return [event.round for event in place.events(RoundMixed, name)]


@pytest.mark.parametrize(
    "settings",
    [
        FactoredGossip.global_m1(10, fragments=2),
        FactoredGossip.global_m1_local_m2(10, fragments=2, mix2_on=("@blocks:2",)),
        FactoredGossip.local_m1_local_m2(10, fragments=2, rounds=2),
        FactoredGossip.noloco(10, fragments=2),
        FactoredGossip(sync_every=10, mix1=Nothing(), mix2=Peers(2), average_momentum=True),
    ],
)
def test_every_preset_trains_together_and_leaves_at_the_mean(settings):
    async def main(place):
        nodes = [place.launch(f"n{number}", settings, steps=120, min_nodes=3) for number in range(3)]
        await place.ended()
        return nodes, [len(ended_rounds(place, node.name)) for node in nodes]

    nodes, rounds = virtually(main)
    assert min(rounds) >= 11 and spread(nodes) < 0.25
    pairs = [(one.model.flat(), other.model.flat()) for one in nodes for other in nodes]
    assert max(float(np.abs(one - other).max()) for one, other in pairs) < 0.1


@pytest.mark.parametrize("settings", [FactoredGossip.global_m1(10), FactoredGossip.noloco(10)])
def test_nodes_that_leave_one_by_one_end_their_last_rounds_mixed(settings):
    async def main(place):
        for number in range(3):
            place.launch(f"n{number}", settings, steps=101 + number, min_nodes=3)
        await place.ended()
        return [place.events(RoundMixed, node.name)[-1] for node in place.nodes]

    assert all(last.mixed == settings.fragments for last in virtually(main))


def test_leaving_waits_no_longer_for_a_mixed_start_than_for_anything_else():
    async def main(place):
        first = place.launch("a", FactoredGossip.global_m1(10, timeout=5.0), steps=41, min_nodes=2)
        other = place.launch("b", FactoredGossip.global_m1(10, timeout=5.0), steps=1000, min_nodes=2)
        while not (first.learner and first.learner.state.local_step >= 40):
            await asyncio.sleep(0.05)
        await other.kill()
        began = place.loop.time()
        await place.ended(first)
        return place.loop.time() - began

    assert virtually(main) < TIMEOUTS.lease + 3 * 5.0


def test_global_m1_never_waits():
    async def main(place):
        nodes = [place.launch(f"n{n}", FactoredGossip.global_m1(10), steps=100, min_nodes=3) for n in range(3)]
        while not any(node.learner and node.learner.state.local_step >= 99 for node in nodes):
            await asyncio.sleep(0.05)
        waited = [node.stall_seconds for node in nodes]
        await place.ended()
        return waited, [event.mixed for event in place.events(RoundMixed)]

    waited, mixed = virtually(main)
    assert waited == [0.0, 0.0, 0.0] and sum(mixed) >= 0.9 * 4 * len(mixed)


def test_a_late_node_starts_from_the_mean_and_is_soon_a_partner():
    async def main(place):
        first = [place.launch(f"n{number}", QUICK, steps=400, min_nodes=2) for number in range(2)]
        await asyncio.sleep(15.0)
        late = place.launch("late", QUICK, steps=200)
        while late.learner is None:
            await asyncio.sleep(0.01)
        start = late.model.flat().copy()
        await place.ended()
        return first, late, start, {name for event in place.events(RoundMixed, "n0") for name in event.partners}

    _first, late, start, partners = virtually(main)
    assert float(np.abs(start - 1.0).max()) < 0.5, "it started from the run's parameters, not from its own"
    assert {"late", "n1"} <= partners and spread([late]) < 0.25


def test_a_killed_partner_costs_at_most_the_timeout_and_is_forgotten():
    async def main(place):
        nodes = [place.launch(f"n{number}", QUICK, steps=400, min_nodes=3) for number in range(3)]
        await asyncio.sleep(12.0)
        await nodes[2].kill()
        await place.ended(*nodes[:2])
        return nodes[:2], place

    nodes, place = virtually(main)
    waits = [event.seconds for event in place.events(RoundMixed)]
    assert max(waits) <= QUICK.timeout + 0.5
    assert all("n2" not in event.partners for event in place.events(RoundMixed, "n0")[-5:])
    assert spread(nodes) < 0.25


def test_a_restarted_node_is_a_member_again():
    async def main(place):
        nodes = [place.launch(f"n{number}", QUICK, steps=500, min_nodes=3) for number in range(3)]
        await asyncio.sleep(12.0)
        await nodes[2].kill()
        await asyncio.sleep(2.0)
        again = place.launch("n2", QUICK, steps=200)
        await place.ended(nodes[0], nodes[1], again)
        return place, again

    place, again = virtually(main)
    late = [event for when, who, event in place.log if who == "n0" and when > 20.0 and isinstance(event, RoundMixed)]
    assert any("n2" in event.partners for event in late) and spread([again]) < 0.25


def test_a_straggler_gives_fewer_steps_and_holds_nobody_up_for_long():
    async def main(place):
        fast = [place.launch(f"n{number}", QUICK, steps=300, min_nodes=3) for number in range(2)]
        slow = place.launch("slow", QUICK, steps=60, min_nodes=3, step_seconds=0.5)
        await place.ended(*fast)
        await place.ended(slow)
        return place, fast

    place, fast = virtually(main)
    steps = [event.steps for event in place.events(RoundMixed, "slow")[2:20]]
    assert max(steps) < 8, "its rounds end when the others wait"
    assert any("slow" in event.partners for event in place.events(RoundMixed, "n0"))
    assert fast[0].stall_seconds < 0.6 * 300 * 0.1


def test_a_node_that_stood_still_goes_on_from_the_mean():
    async def main(place):
        nodes = [place.launch(f"n{number}", QUICK, steps=600, min_nodes=3) for number in range(3)]
        await asyncio.sleep(12.0)
        nodes[2].clock.freeze()
        await asyncio.sleep(15.0)
        nodes[2].clock.thaw()
        nodes[2].steps = nodes[2].learner.state.local_step + 100
        await place.ended()
        return place, nodes

    place, nodes = virtually(main)
    assert place.events(Rejoined, "n2") and not place.events(Rejoined, "n0")
    assert spread(nodes) < 0.25


def test_a_partition_ends_and_the_node_counts_as_the_others_do():
    async def main(place):
        settings = replace(QUICK, mix2=Nothing())
        nodes = [place.launch(f"n{n}", settings, steps=600, min_nodes=3) for n in range(2)]
        quick = place.launch("n2", settings, steps=9000, min_nodes=3, step_seconds=0.05)
        await asyncio.sleep(12.0)
        place.stores["n2"].up = False
        await asyncio.sleep(20.0)
        place.stores["n2"].up = True
        await asyncio.sleep(25.0)
        rounds = [node.learner.state.round for node in (*nodes, quick)]
        for node in (*nodes, quick):
            node.steps = 0
        await place.ended()
        return place, rounds, nodes

    place, rounds, nodes = virtually(main)
    assert max(rounds) - min(rounds) <= 2
    assert not place.events(Rejoined, "n0"), "who was cut off does not drag the others along"
    assert spread(nodes) < 0.25


def test_an_outage_stops_nobodys_training():
    async def main(place):
        settings = FactoredGossip.global_m1(10, fragments=2)
        nodes = [place.launch(f"n{number}", settings, steps=300, min_nodes=3) for number in range(3)]
        await asyncio.sleep(12.0)
        before = [node.learner.state.local_step for node in nodes]
        for store in place.stores.values():
            store.up = False
        await asyncio.sleep(10.0)
        during = [node.learner.state.local_step for node in nodes]
        for store in place.stores.values():
            store.up = True
        await place.ended()
        return before, during, nodes

    before, during, nodes = virtually(main)
    assert min(after - then for then, after in zip(before, during, strict=True)) >= 95
    assert spread(nodes) < 0.25


def test_the_mailbox_stays_small():
    async def main(place):
        nodes = [place.launch(f"n{number}", QUICK, steps=600, min_nodes=3) for number in range(3)]
        sizes = []
        while not all(node.task.done() for node in nodes):
            await asyncio.sleep(1.0)
            sizes.append((len(place.listed("live/")), len(place.listed("blobs/"))))
        return sizes

    sizes = virtually(main)
    early, late = max(sizes[10:20]), max(sizes[-15:-5])
    assert late[0] <= early[0] + 10 and late[1] <= early[1] + 8


def test_probes_strengthen_mix2_while_nodes_disagree():
    async def main(place):
        place.seeds = 6
        settings = replace(QUICK, mix2=Nothing(), strengthen=Strengthen(1e-9, "l2"))
        for number in range(3):
            place.launch(f"n{number}", settings, steps=150, min_nodes=3)
        await place.ended()
        return place

    place = virtually(main)
    told = place.events(Disagreement, "n0")
    assert any(event.strong for event in told) and any(event.l2 == 0.0 and not event.strong for event in told)
    strong = {event.round for event in told if event.strong}
    assert all(event.partners for event in place.events(RoundMixed, "n0") if event.round in sorted(strong)[1:-2])


class Opinionated(Bowl):
    """A bowl whose outputs depend on its first parameter."""

    def probe_outputs(self):
        chance = 1.0 / (1.0 + np.exp(-5.0 * float(self.flat()[0])))
        return np.array([[chance, 1.0 - chance]], np.float32)


def test_the_divergence_of_outputs_is_told():
    async def main(place):
        settings = replace(QUICK, mix2=Nothing())
        for number in range(3):
            place.launch(f"n{number}", settings, steps=100, min_nodes=3, model=Opinionated(sigma=0.5))
        await place.ended()
        return place.events(Disagreement, "n0")

    told = [event.js for event in virtually(main) if event.js is not None]
    assert len(told) >= 5 and all(0.0 <= value < np.sqrt(np.log(3)) for value in told) and max(told) > 0.0


def test_garbage_where_a_roster_should_be_costs_one_rounds_mixing():
    async def main(place):
        nodes = [place.launch(f"n{number}", QUICK, steps=100, min_nodes=2) for number in range(2)]
        await place.mailbox.create(RosterKey(3).path, b"not a record")
        await place.ended()
        return {event.round: event.partners for event in place.events(RoundMixed, "n0")}, nodes

    partners, nodes = virtually(main)
    assert partners[3] == () and partners[4] != () and spread(nodes) < 0.25


def test_a_run_of_another_algorithm_is_refused():
    async def main(place):
        await place.ended(place.launch("a", EXACT, steps=5))
        await place.ended(place.launch("b", replace(EXACT, mix1=Peers(1)), steps=5))

    with pytest.raises(RunMismatch, match="mix1"):
        virtually(main)


def test_a_run_is_taken_up_again_after_everyone_left():
    async def main(place):
        first = [place.launch(f"a{number}", QUICK, steps=100, min_nodes=2) for number in range(2)]
        await place.ended(*first)
        await asyncio.sleep(1000.0)
        again = place.launch("b", QUICK, steps=1)
        await place.ended(again)
        return again, len(ended_rounds(place, "a0"))

    again, rounds = virtually(main)
    assert again.learner.state.round >= rounds and spread([again]) < 0.3


def test_all_mixes_over_all_keep_equal_nodes_equal():
    async def main(place):
        nodes = [place.launch(f"n{number}", EXACT, steps=100, min_nodes=3) for number in range(3)]
        await place.ended()
        return [node.model.flat() for node in nodes], [event.l2 for event in place.events(Disagreement)]

    flats, apart = virtually(main)
    assert flats[0].tobytes() == flats[1].tobytes() == flats[2].tobytes() and set(apart) == {0.0}


def test_the_settings_name_their_mixes():
    assert EXACT.mix1 == EXACT.mix2 == All()
