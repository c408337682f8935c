"""Drawing up, reading and doubting rosters."""

from collections import Counter
from dataclasses import replace

import pytest

from gradientmail_core.algorithms.gossip import Strengthen
from gradientmail_core.algorithms.mixing import Peers
from gradientmail_core.engine.gossip_roster import (
    Agreed,
    Ahead,
    Alone,
    Behind,
    Draft,
    Listed,
    Probes,
    drawn,
    listed_gossip,
    newest_roster,
    spread_out,
    standing,
)
from gradientmail_core.events import ObjectIgnored
from gradientmail_core.protocol.gossip import MeanKey, RosterKey, ShareKey
from tests.core.engine.gossip_parts import EXACT, live, roster, virtually


def test_averagers_are_spread_evenly_and_alike_for_all():
    nodes = [f"n{number}" for number in range(3)]
    chosen = spread_out("5a", 8, nodes)
    assert sorted(Counter(chosen).values()) == [2, 3, 3]
    assert spread_out("5a", 8, nodes) == chosen != spread_out("5b", 8, nodes)


def test_the_first_draws_up_the_roster_and_the_others_read_it():
    async def main(place):
        a, b = await place.surroundings("a"), await place.surroundings("b")
        for here in (a, b):
            live(here.board, "a", "b", tag="0a" * 8)
        first = await standing(a.host, a.run, a.board, 0, Draft())
        second = await standing(b.host, b.run, b.board, 0, Draft())
        return first, second

    first, second = virtually(main)
    assert isinstance(first, Agreed) and isinstance(second, Agreed)
    assert first.roster == second.roster and first.roster.active == ("a", "b")
    assert first.listed is not None and second.listed is None


def test_members_who_gave_nothing_before_are_silent():
    async def main(place):
        here = await place.surroundings("a")
        live(here.board, "a", "b", "c")
        return drawn(here.host, here.run, here.board, 5, Draft(), {"a", "b"})

    record = virtually(main)
    assert [(member.node, member.silent) for member in record.members] == [("a", False), ("b", False), ("c", True)]
    assert set(record.averagers) <= {"a", "b"}


def test_nodes_that_are_gone_or_evaluate_are_no_members():
    async def main(place):
        here = await place.surroundings("a")
        live(here.board, "b", state="e")
        live(here.board, "c", state="x")
        live(here.board, "d", state="d")
        return drawn(here.host, here.run, here.board, 5, Draft(), ())

    assert virtually(main).active == ("a", "d")


@pytest.mark.parametrize(
    ("mix1", "round", "finishing", "mean"),
    [(EXACT.mix1, 3, False, True), (Peers(2), 3, False, False), (Peers(2), 10, False, True), (Peers(2), 3, True, True)],
)
def test_partial_mixes_average_over_all_now_and_then(mix1, round, finishing, mean):
    async def main(place):
        here = await place.surroundings("a", replace(EXACT, mix1=mix1))
        return drawn(here.host, here.run, here.board, round, Draft(finishing=finishing), ())

    assert virtually(main).mean is mean


@pytest.mark.parametrize(
    ("probe", "probes", "strong"),
    [
        ("l2", Probes(0.3, None), True),
        ("l2", Probes(0.1, 9.0), False),
        ("js", Probes(9.0, None), False),
        ("js", Probes(None, 0.3), True),
    ],
)
def test_a_probe_above_its_threshold_strengthens_the_round(probe, probes, strong):
    async def main(place):
        here = await place.surroundings("a", replace(EXACT, strengthen=Strengthen(0.2, probe)))
        return drawn(here.host, here.run, here.board, 3, Draft(probes), ())

    record = virtually(main)
    assert record.strong is strong and (record.l2, record.js) == (probes.l2, probes.js)


async def with_rosters(place, *rounds):
    here = await place.surroundings("a")
    for round in rounds:
        await place.mailbox.create(RosterKey(round).path, roster(here, round, ("b", "c")).encoded())
    return here


@pytest.mark.parametrize(
    ("rosters", "round", "where"),
    [
        ((7,), 2, Ahead(7)),
        ((2, 3, 4), 2, Ahead(4)),
        ((2, 3), 2, None),
        ((2,), 3, None),
        ((2,), 9, Behind(3)),
        ((), 4, None),
    ],
)
def test_a_node_finds_out_where_the_run_is(rosters, round, where):
    async def main(place):
        here = await with_rosters(place, *rosters)
        return await standing(here.host, here.run, here.board, round, Draft())

    found = virtually(main)
    assert found == where if where is not None else isinstance(found, Agreed) and found.roster.round == round


def test_garbage_in_a_rosters_place_leaves_the_node_alone_for_a_round():
    async def main(place):
        here = await with_rosters(place, 2)
        await place.mailbox.create(RosterKey(3).path, b"not a record")
        return await standing(here.host, here.run, here.board, 3, Draft())

    assert isinstance(virtually(main), Alone)


def test_garbage_far_ahead_is_not_believed():
    async def main(place):
        here = await with_rosters(place, 2)
        await place.mailbox.create(RosterKey(999).path, b"not a record")
        await place.mailbox.create("live/gossip/readme", b"?")
        found = await standing(here.host, here.run, here.board, 3, Draft())
        listed = await listed_gossip(here.host, here.board)
        return found, await newest_roster(here.host, here.run, listed.rosters), place.events(ObjectIgnored)

    found, newest, ignored = virtually(main)
    assert isinstance(found, Agreed) and newest == 3
    assert [event.key for event in ignored] == ["live/gossip/readme"]


def test_a_listing_tells_means_and_givers():
    listed = Listed(
        (
            MeanKey(3, 0, True),
            MeanKey(5, 0, True),
            MeanKey(6, 0),
            MeanKey(4, 1, True),
            ShareKey(5, "grad", 0, "b"),
            RosterKey(5),
        )
    )
    assert listed.means(0) == [5, 3] and listed.means(2) == []
    assert listed.givers(5) == {"b"} and listed.givers(4) == frozenset()
