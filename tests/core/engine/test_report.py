"""The report on a run says who trains, what was merged and what was refused."""

import asyncio

import pytest

from gradientmail_core.engine.report import Fragment, Node, Report, age_text, reported
from gradientmail_core.protocol.keys import LeaseState
from gradientmail_core.sim.world import ended
from tests.core.engine.visits import LEASE, Place, all_ended, at_place


async def report_on(place: Place) -> Report:
    report = await reported(place.visitor(), place.loop.time(), LEASE)
    assert report is not None
    return report


def test_a_run_in_training_and_after_its_end() -> None:
    async def main(place: Place) -> None:
        nodes = [place.node(name, steps=300, min_nodes=2) for name in "ab"]
        await asyncio.sleep(20)
        report = await report_on(place)
        assert report.verdict.startswith("training: 2 nodes, version ") and report.verdict.endswith(" s ago")
        assert [(node.name, node.state, node.lives) for node in report.nodes] == [("a", "t", True), ("b", "t", True)]
        assert all(node.step > 100 and node.tokens for node in report.nodes)
        newest = report.rounds[0]
        assert {node for node, steps in newest.participants if steps} == {"a", "b"} and newest.refusals == ()
        assert newest.step >= report.rounds[-1].step and len(report.rounds) == 12
        assert report.tokens > 0 and report.unit == "version" and report.parameters == 128
        await ended(nodes)
        assert (await report_on(place)).verdict.startswith("nobody is training: version 15")
        await asyncio.sleep(3600)
        assert not any(node.lives for node in (await report_on(place)).nodes)

    at_place(main)


def test_refusals_are_told_with_their_reasons() -> None:
    async def main(place: Place) -> None:
        nodes = [place.node(name, steps=120, min_nodes=2) for name in "ab"]
        await asyncio.sleep(5)
        nodes[1].model.poison(float("nan"))
        await asyncio.sleep(4)
        report = await report_on(place)
        assert ("b", "nonfinite") in {refusal for round in report.rounds for refusal in round.refusals}

    at_place(main)


def test_a_killed_node_is_silent_after_its_lease() -> None:
    async def main(place: Place) -> None:
        nodes = [place.node(name, steps=3000, min_nodes=2) for name in "ab"]
        await asyncio.sleep(10)
        await nodes[1].kill()
        await asyncio.sleep(2 * LEASE)
        alive = {node.name: node.lives for node in (await report_on(place)).nodes}
        assert alive == {"a": True, "b": False}
        await nodes[0].kill()

    at_place(main)


def test_a_gossip_run() -> None:
    async def main(place: Place) -> None:
        nodes = [place.gossip(name, steps=300, min_nodes=2) for name in "ab"]
        await asyncio.sleep(15)
        report = await report_on(place)
        assert report.verdict.startswith("training: 2 nodes, mean of round ")
        assert {node for round in report.rounds for node, _ in round.participants} == {"a", "b"}
        assert report.tokens > 0 and "gossip" in report.stored
        await all_ended(nodes)

    at_place(main)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.4, "8 s ago"), (149.0, "2 min ago"), (7300.0, "2 h ago"), (1e6, "12 d ago"), (None, "at an unknown time")],
)
def test_how_long_ago(seconds: float | None, text: str) -> None:
    assert age_text(seconds) == text


def verdict(*nodes: Node, versions: tuple[int, ...] = (0,)) -> str:
    fragments = tuple(Fragment(version, 8.4) for version in versions)
    return Report("r", "u", {}, 1, "version", nodes, fragments, (), 0, {}).verdict


def test_the_line_for_each_state_of_a_run() -> None:
    states: tuple[LeaseState, ...] = ("t", "j", "w", "e", "s", "d")
    here = [Node("a", state, 0, 1.0, True) for state in states]
    assert verdict(here[0], versions=(119, 120)) == "training: 1 node, version 120, 8 s ago"
    assert verdict(here[1], here[2]) == "waiting: 2 nodes about to train, no version yet"
    assert verdict(here[3]) == "paused: 1 node between steps, such as in evaluation, no version yet"
    assert verdict(here[4], here[5], versions=(3,)) == "nobody is training: version 3, 8 s ago"
    assert verdict(Node("a", "t", 0, 1e6, False)) == "nobody is training: no version yet"
