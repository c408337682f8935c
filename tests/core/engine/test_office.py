"""Nodes of role either: one of them closes for all while others train, and trains again when it must."""

import asyncio
from dataclasses import replace

from gradientmail_core.engine.office import Office
from gradientmail_core.engine.run import Board
from gradientmail_core.events import SyncerElected
from gradientmail_core.protocol.keys import LeaseKey, parse_term, term_key
from gradientmail_core.protocol.records import Claim
from gradientmail_core.session.syncing import serve
from gradientmail_core.sim.checks import forks, tape
from gradientmail_core.sim.loop import VirtualClock
from gradientmail_core.sim.world import SimulatedNode, ended
from tests.core.engine.parts import SETTINGS, TIMEOUTS, Place, created, run_of, virtually

QUICK = replace(SETTINGS, grace_seconds=0.3)
LONG = 10**6


async def closers_in(place: Place, seconds: float) -> set[str]:
    before = len(await tape(place.mailbox))
    await asyncio.sleep(seconds)
    return {record.node for record in (await tape(place.mailbox))[before:]}


def trained(node: SimulatedNode) -> int:
    assert node.learner is not None
    return node.learner.state.local_step


def elections(place: Place) -> list[tuple[str, bool]]:
    return [(event.node, event.serving) for event in place.events(SyncerElected)]


def test_one_of_two_is_elected_and_closes_while_the_other_trains_on() -> None:
    async def main(place: Place) -> None:
        a = place.launch("a", settings=QUICK, steps=LONG, min_nodes=3)
        others = [place.launch(name, settings=QUICK, steps=LONG, min_nodes=3, role="either") for name in "bc"]
        await asyncio.sleep(12.0)
        ((elected, serving),) = elections(place)
        holder, learner = sorted(others, key=lambda node: node.name != elected)
        before = [trained(node) for node in (a, holder, learner)]
        assert serving and await closers_in(place, 20.0) == {elected}
        after = [trained(node) for node in (a, holder, learner)]
        assert [later > earlier for earlier, later in zip(before, after, strict=True)] == [True, False, True]
        records = await tape(place.mailbox)
        assert {who.node for record in records[-6:] for who in record.participants} == {"a", learner.name}
        for node in (a, *others):
            await node.kill()

    virtually(main)


def test_when_the_elected_dies_the_other_follows_in_the_next_term() -> None:
    async def main(place: Place) -> None:
        nodes = {name: place.launch(name, settings=QUICK, steps=LONG, min_nodes=3, role="either") for name in "abc"}
        await asyncio.sleep(12.0)
        ((first, _),) = elections(place)
        await nodes[first].kill()
        await asyncio.sleep(TIMEOUTS.lease + 3 * TIMEOUTS.period)
        (_, (second, serving)) = elections(place)
        assert second != first and serving
        assert [parse_term(key) for key in place.listed("syncer/")] == [0, 1]
        assert await closers_in(place, 10.0) == {second} and not await forks(place.mailbox)
        for node in nodes.values():
            await node.kill()

    virtually(main)


def test_it_hands_in_what_it_has_and_trains_again_when_nobody_else_does() -> None:
    async def main(place: Place) -> None:
        settings = replace(QUICK, overlap_steps=0, quorum_size=2, flush_on_close=True)
        leaves = place.launch("a", settings=settings, steps=300, min_nodes=2)
        stays = place.launch("b", settings=settings, steps=200, min_nodes=2, role="either")
        await ended([leaves, stays])
        assert elections(place) == [("b", True), ("b", False)] and trained(stays) == 200
        records = await tape(place.mailbox)
        steps = sum(who.steps for record in records for who in record.participants if who.node == "b")
        assert steps >= 2 * (200 - 1), "a commit may land on the first step after the office"

    virtually(main)


def test_it_trains_again_while_a_dedicated_syncer_lives() -> None:
    async def main(place: Place) -> None:
        nodes = [
            place.launch(name, settings=QUICK, steps=LONG, min_nodes=2, role=role)
            for name, role in (("a", "both"), ("b", "either"))
        ]
        await asyncio.sleep(12.0)
        stopping = asyncio.Event()
        clock, timeouts = VirtualClock(place.loop), TIMEOUTS
        syncer = asyncio.ensure_future(
            serve(place.mailbox, node="s", stopping=stopping, timeouts=timeouts, clock=clock, callbacks=[])
        )
        await asyncio.sleep(8.0)
        assert elections(place) == [("b", True), ("b", False)] and await closers_in(place, 8.0) == {"s"}
        stopping.set()
        await syncer
        await asyncio.sleep(TIMEOUTS.lease)
        assert elections(place)[2:] == [("b", True)] and len(place.listed("syncer/")) == 2
        for node in nodes:
            await node.kill()

    virtually(main)


def test_a_winner_that_was_just_elected_is_given_time_and_a_dead_one_is_not() -> None:
    async def main(place: Place) -> None:
        host = place.host("b")
        run = await created(host, QUICK)
        board = Board(host)
        office = Office(host, run, board)
        claim = Claim(run.id, "c", "0c" * 8, host.nonce())
        await place.mailbox.put(term_key(4), claim.encoded())
        board.listed([LeaseKey("a", 0, "t", 0, "0a" * 8), LeaseKey("c", 0, "t", 0, "0c" * 8)])
        assert not await office.holds()
        board.listed([LeaseKey("a", 1, "t", 0, "0a" * 8), LeaseKey("c", 1, "x", 0, "0c" * 8)])
        assert await office.holds() and await office.holds() and place.listed("syncer/")[-1] == term_key(5)

    virtually(main)


def test_what_is_no_claim_only_costs_its_term() -> None:
    async def main(place: Place) -> None:
        host = place.host("b")
        run = await created(host, QUICK)
        board = Board(host)
        await place.mailbox.put(term_key(0), b"junk")
        await place.mailbox.put("syncer/readme", b"junk")
        board.listed([LeaseKey("a", 0, "t", 0, "0a" * 8)])
        assert await Office(host, run, board).holds()
        assert place.listed("syncer/") == [term_key(0), term_key(1), "syncer/readme"]

    virtually(main)


def test_nobody_is_elected_alone_or_where_one_node_was_named() -> None:
    async def main(place: Place) -> None:
        host, run = place.host("b"), run_of(QUICK)
        board = Board(host)
        assert not await Office(host, run, board).holds()
        board.listed([LeaseKey("a", 0, "t", 0, "0a" * 8)])
        named = replace(run, manifest=replace(run.manifest, store="none"))
        assert not await Office(host, named, board).holds() and not place.listed("syncer/")

    virtually(main)
