"""A run seen from outside: who lives, how far it is, at a cost that does not grow."""

import asyncio

from gradientmail_core.engine.survey import Presence, bytes_by_kind, presences, surveyed
from gradientmail_core.mailbox import Entry, MeteredMailbox
from gradientmail_core.protocol.keys import DeltaKey, LeaseKey
from gradientmail_core.sim.checks import tape
from gradientmail_core.sim.world import ended
from tests.core.engine.visits import LEASE, Place, all_ended, at_place

TAG = "0" * 16


def test_whatever_a_node_writes_is_a_sign_of_life() -> None:
    beat, old = LeaseKey("a", 7, "t", 30, TAG), LeaseKey("a", 6, "t", 20, TAG)
    objects = [Entry(old.path, 2, 100.0), Entry(beat.path, 2, 120.0), Entry("live/leases/junk", 1, 199.0)]
    assert presences(objects, 200.0, ()) == {"a": Presence(beat, 80.0)}
    assert presences([*objects, Entry(DeltaKey(4, "a").path, 9, 190.0)], 200.0, ())["a"].age == 10.0
    assert presences(objects, 200.0, [("a", 3.0), ("b", 1.0)]) == {"a": Presence(beat, 3.0)}


def test_who_left_is_gone_and_who_has_no_known_age_may_live() -> None:
    assert not Presence(LeaseKey("a", 7, "x", 30, TAG), 1.0).lives(LEASE)
    assert not Presence(LeaseKey("a", 7, "t", 30, TAG), LEASE).lives(LEASE)
    assert Presence(LeaseKey("a", 7, "t", 30, TAG), None).lives(LEASE)


def test_a_run_is_read_at_the_same_cost_at_any_age() -> None:
    async def main(place: Place) -> tuple[int, ...]:
        costs = []
        for steps in (60, 600):
            await ended([place.node(name, steps=steps) for name in "ab"])
            meter = MeteredMailbox(place.shared)
            survey = await surveyed(place.visitor(meter), place.loop.time())
            assert survey is not None
            newest = {record.round % 2: record for record in await tape(place.shared)}
            assert [chain.records[0] for chain in survey.chains] == [newest[0], newest[1]]
            assert [chain.version for chain in survey.chains] == [newest[p].round // 2 for p in (0, 1)]
            assert all(chain.age is not None and 0 <= chain.age < 60 for chain in survey.chains)
            assert all(len(chain.records) == min(6, chain.version) for chain in survey.chains)
            costs.append(meter.usage.requests)
        return tuple(costs)

    first, later = at_place(main)
    assert later <= first + 8 and later <= 40


def test_a_stores_clock_is_never_behind_what_was_written() -> None:
    async def main(place: Place) -> None:
        await ended([place.node("a")])
        survey = await surveyed(place.visitor(), 0.0)
        assert survey is not None and survey.now == max(entry.modified or 0 for entry in survey.objects)
        sizes = bytes_by_kind(survey)
        assert sizes["payloads"] == sum(entry.size for entry in survey.objects if entry.key.startswith("blobs/"))
        assert sizes["records, about"] > 0

    at_place(main)


def test_a_gossip_run_is_told_by_its_roster_and_means() -> None:
    async def main(place: Place) -> None:
        await all_ended([place.gossip(name, min_nodes=2) for name in "ab"])
        survey = await surveyed(place.visitor(), place.loop.time())
        assert survey is not None and survey.chains == () and survey.mixing is not None
        assert survey.mixing.roster is not None and survey.mixing.roster.round >= 8
        for mean, age in survey.mixing.means:
            assert mean is not None and mean.round >= 8 and age is not None

    at_place(main)


def test_an_empty_prefix_has_no_run() -> None:
    async def main(place: Place) -> None:
        assert await surveyed(place.visitor(), 0.0) is None
        await asyncio.sleep(0)

    at_place(main)


def test_a_node_that_publishes_lives_though_it_does_not_beat() -> None:
    async def main(place: Place) -> None:
        nodes = [place.node(name, steps=3000, min_nodes=2) for name in "ab"]
        for _ in range(20):
            await asyncio.sleep(7.3)
            survey = await surveyed(place.visitor(), place.loop.time())
            assert survey is not None
            assert {node: presence.lives(LEASE) for node, presence in survey.presences.items()} == {
                "a": True,
                "b": True,
            }
        for node in nodes:
            await node.kill()

    at_place(main)
