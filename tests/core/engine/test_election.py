"""Closing spreads over whoever lives, in an order all agree on, and moves one fragment at a time."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from gradientmail_core.engine.election import next_closer, next_of_all, rendezvous

NODES = [f"n{number}" for number in range(8)]


def commit(me: str, fragment: int, closers: dict[int, str], live: Iterable[str], leaving: bool = False) -> str:
    return next_closer(me, run="r", fragment=fragment, closers=closers, live=tuple(live), leaving=leaving)


def test_the_order_does_not_depend_on_how_nodes_are_listed() -> None:
    shuffled = random.Random(0).sample(NODES, len(NODES))
    assert rendezvous("r", 0, NODES) == rendezvous("r", 0, shuffled)
    assert sorted(rendezvous("r", 0, NODES)) == NODES


def test_a_death_moves_nobody_elses_claim() -> None:
    for fragment in range(20):
        order = rendezvous("r", fragment, NODES)
        assert rendezvous("r", fragment, [node for node in NODES if node != order[0]]) == order[1:]


def test_every_node_comes_first_for_some_fragment() -> None:
    first = Counter(rendezvous("r", fragment, NODES)[0] for fragment in range(400))
    assert set(first) == set(NODES)
    assert max(first.values()) < 3 * min(first.values())


def test_runs_have_orders_of_their_own() -> None:
    assert len({rendezvous(f"run {number}", 0, NODES) for number in range(20)}) > 15


def test_alone_a_node_keeps_everything_even_when_it_leaves() -> None:
    closers = dict.fromkeys(range(4), "a")
    assert commit("a", 0, closers, ["a"]) == "a"
    assert commit("a", 0, closers, ["a"], leaving=True) == "a"
    assert commit("a", 0, closers, []) == "a"


def test_a_fair_share_is_kept() -> None:
    closers = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert commit("a", 0, closers, ["a", "b"]) == "a"


def test_more_than_a_fair_share_is_handed_to_who_holds_less() -> None:
    closers = {0: "a", 1: "a", 2: "a", 3: "b"}
    assert commit("a", 0, closers, ["a", "b"]) == "b"


def test_of_those_who_hold_less_the_first_in_rendezvous_order_gets_it() -> None:
    closers = dict.fromkeys(range(6), "a")
    for fragment in range(6):
        expected = rendezvous("r", fragment, ["b", "c"])[0]
        assert commit("a", fragment, closers, ["a", "b", "c"]) == expected


def test_an_uneven_rest_is_not_passed_around() -> None:
    closers = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}
    assert all(commit("a", fragment, closers, ["a", "b", "c"]) == "a" for fragment in (0, 1))


def test_who_leaves_names_another_whatever_the_shares() -> None:
    closers = {0: "a", 1: "b", 2: "b", 3: "b"}
    assert commit("a", 0, closers, ["a", "b"], leaving=True) == "b"
    assert commit("a", 0, closers, ["b"], leaving=True) == "b"


def test_the_dead_are_never_named() -> None:
    closers = dict.fromkeys(range(8), "a")
    assert {commit("a", fragment, closers, ["a", "b"]) for fragment in range(8)} == {"b"}
    for leaving in (False, True):
        assert commit("a", 0, closers, ["a", "c"], leaving) == "c"


@pytest.mark.parametrize(("fragments", "nodes"), [(1, 3), (4, 2), (4, 8), (7, 3), (24, 5)])
def test_commits_spread_closing_and_then_leave_it_alone(fragments: int, nodes: int) -> None:
    live = NODES[:nodes]
    closers = dict.fromkeys(range(fragments), live[0])
    moves = []
    for _ in range(fragments + 2):
        moved = 0
        for fragment in range(fragments):
            named = commit(closers[fragment], fragment, closers, live)
            moved += named != closers[fragment]
            closers[fragment] = named
        moves.append(moved)
    share = -(-fragments // nodes)
    assert max(Counter(closers.values()).values()) <= share
    assert moves[0] == fragments - min(share, fragments)
    assert not any(moves[1:])


def of_all(me: str, closers: dict[int, str], live: str, leaving: bool = False) -> str:
    return next_of_all(me, run="r", closers=closers, live=tuple(live), leaving=leaving)


def test_where_one_closes_all_it_keeps_them_however_many_others_live() -> None:
    for me in "abc":
        assert of_all(me, dict.fromkeys(range(4), me), "abc") == me


def test_two_that_took_over_from_one_dead_closer_name_the_same_node() -> None:
    closers = {0: "a", 1: "c", 2: "dead"}
    assert of_all("a", closers, "abc") == of_all("c", closers, "abc") == rendezvous("r", 0, "ac")[0]


def test_who_leaves_or_makes_way_for_a_syncer_names_another_if_there_is_one() -> None:
    assert of_all("a", {0: "a"}, "abc", leaving=True) == rendezvous("r", 0, "bc")[0]
    assert of_all("a", {0: "a"}, "s") == "s"
    assert of_all("a", {0: "a"}, "a", leaving=True) == of_all("a", {0: "a"}, "") == "a"
