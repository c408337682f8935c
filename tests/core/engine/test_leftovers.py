"""What crashes left goes; what a run, a joiner or the newest versions need never does."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.engine.leftovers import HANDOFF_AGE, Leftovers
from gradientmail_core.errors import MailboxUnavailable, RunMismatch
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.mailbox.careful import OneWriterMailbox
from gradientmail_core.protocol.gossip import MeanKey, ShareKey, parse_gossip
from gradientmail_core.protocol.keys import BLOBS, ClaimKey, DeltaKey, HeadKey, LeaseKey, blob_key, creation_key
from gradientmail_core.protocol.recipes import UnitKey
from gradientmail_core.sim.checks import committed_parameters, forks, tape
from gradientmail_core.sim.world import SimulatedNode, ended
from tests.core.engine.visits import SETTINGS, Place, all_ended, at_place

SHA = "ab" * 32
DAY = 86_400.0


def kinds(leftovers: Leftovers) -> dict[str, set[str]]:
    return {kind: {entry.key for entry in here} for kind, here in leftovers.found.items() if here}


async def trained(place: Place, names: str = "ab", steps: int = 100) -> list[SimulatedNode]:
    """A run that has come to its end, long ago."""
    nodes = [place.node(name, steps=steps, min_nodes=len(names)) for name in names]
    await ended(nodes)
    return nodes


async def intact(place: Place, nodes: list[SimulatedNode]) -> None:
    """The run has no fork, its newest versions are whole, and a newcomer trains from them."""
    assert await forks(place.shared) == []
    committed = await committed_parameters(place.shared)
    for node in nodes:
        for name, values in node.model.values.items():
            assert np.array_equal(values, committed[name])
    before = len(await tape(place.shared))
    await ended([place.node("newcomer", steps=60)])
    assert len(await tape(place.shared)) > before


STRANGERS = {"blobs/notes.txt", "live/leases/readme", "live/gossip/x", "units/data/mine"}


async def littered(place: Place) -> dict[str, set[str]]:
    """Leave one of everything that a crash can; the keys by kind."""
    left = {
        "payloads": {blob_key(6, "dead", SHA), blob_key(1, "loser", SHA), blob_key(5, "dead", SHA, compressed=True)},
        "snapshots": {DeltaKey(5, "dead").path},
        "claims": {ClaimKey(5, 0).path, creation_key(0)},
        "hints": {HeadKey(1, 3).path},
        "unit claims": {UnitKey("data", 0, "claim").path, UnitKey("data", 0, "release").path},
        "probes": {"probe/dead-race", "doctor/1234/large/0"},
        "leases": {LeaseKey("dead", beat, "t", 5, "0" * 16).path for beat in range(2)},
    }
    for key in {key for keys in left.values() for key in keys} | STRANGERS:
        await place.shared.put(key, b"{}")
    for unit in (UnitKey("data", 0, "done"), UnitKey("data", 1, "claim"), UnitKey("data", 1, "release")):
        await place.shared.put(unit.path, b"{}")
    return left


def test_what_crashes_left_goes_and_nothing_else() -> None:
    async def main(place: Place) -> None:
        nodes = await trained(place)
        await place.clean()  # the nodes' own last beats
        before = set(place.listed())
        left = await littered(place)
        await asyncio.sleep(DAY)
        found = await place.leftovers(3600.0)
        left["hints"] &= kinds(found)["hints"]  # where the run itself left an older one, that too
        assert {kind: keys & left[kind] for kind, keys in kinds(found).items()} == left
        assert {key for keys in kinds(found).values() for key in keys} <= {
            k for keys in left.values() for k in keys
        } | before
        assert {entry.key for entry in found.strangers} == STRANGERS
        went = await place.clean(3600.0)
        assert went["snapshots"] == {"objects": 1, "bytes": 2}
        assert kinds(await place.leftovers(3600.0)) == {}
        kept = set(place.listed())
        assert kept >= STRANGERS and not kept & left["payloads"]
        assert {UnitKey("data", 1, "claim").path, UnitKey("data", 1, "release").path} <= kept
        await intact(place, nodes)

    at_place(main)


def test_what_is_young_or_has_no_age_is_left() -> None:
    async def main(place: Place) -> None:
        await trained(place)
        await asyncio.sleep(DAY)
        await place.clean()
        left = await littered(place)
        found = await place.leftovers(3600.0)
        assert kinds(found) == {}
        assert {entry.key for entry in found.young} >= left["payloads"] | left["snapshots"]
        place.shared._now = lambda: place.loop.time()
        place.shared._listing = [replace(entry, modified=None) for entry in place.shared._listing]
        assert kinds(await place.leftovers(0.0)) == {}

    at_place(main)


def test_a_handoff_waits_a_month_for_its_node_and_goes_with_its_record_first() -> None:
    """Of a node that is gone the newest stays; what a crash left of others goes, and nothing while it lives."""

    def part(node: str, number: int, name: str) -> str:
        return f"handoff/{node}/{number:010d}-{'0' * 16}/{name}"

    newest = {part("gone", 7, name) for name in ("0000", "0001", "record")}
    left = {part("gone", 6, "0000"), part("gone", 6, "record"), part("gone", 8, "0000"), part("never", 0, "0000")}
    lives = {part("a", 1, name) for name in ("0000", "record")} | {part("a", 0, "record")}
    strangers = {"handoff/readme", "handoff/gone/x/record"}

    async def main(place: Place) -> None:
        await trained(place, "b")
        for key in newest | left | lives | strangers:
            await place.shared.put(key, b"{}")
        await asyncio.sleep(DAY)
        node = place.node("a", steps=10**6)
        await asyncio.sleep(5.0)
        assert kinds(await place.leftovers(3600.0))["hand-offs"] == left
        await place.clean(3600.0)
        assert set(place.listed("handoff/")) == newest | lives | strangers
        await node.kill()
        await asyncio.sleep(HANDOFF_AGE)
        deleted, delete = list[str](), place.shared.delete

        async def noted(key: str) -> None:
            deleted.append(key)
            await delete(key)

        place.shared.delete = noted  # type: ignore[method-assign]  # to see the order
        await place.clean(3600.0)
        assert set(place.listed("handoff/")) == strangers
        gone = [key.rsplit("/", 1)[1] for key in deleted if key in newest]
        assert gone[0] == "record"

    at_place(main)


def test_open_rounds_are_touched_only_when_nobody_lives() -> None:
    async def main(place: Place) -> None:
        nodes = await trained(place)
        await place.clean()
        head = (await tape(place.shared))[-1].round
        payload, claim, snapshot = (
            blob_key(head + 2, "a", SHA),
            ClaimKey(head + 2, 0).path,
            DeltaKey(head + 2, "a").path,
        )
        for key in (payload, claim, snapshot):
            await place.shared.put(key, b"{}")
        beat = LeaseKey("a", 99, "t", 100, "0" * 16).path
        await place.shared.put(beat, b"{}")
        assert kinds(await place.leftovers()) == {}
        await asyncio.sleep(DAY)
        found = await place.leftovers(3600.0)
        assert kinds(found) == {"payloads": {payload}, "claims": {claim}, "leases": {beat}}
        await place.shared.put(LeaseKey("b", 99, "j", 0, "0" * 16).path, b"{}")  # somebody starts just now
        await place.clean(3600.0)
        assert payload in place.listed()
        await place.shared.delete(snapshot)
        await intact(place, nodes)

    at_place(main)


def test_a_node_that_appears_between_look_and_removal_keeps_the_open_rounds() -> None:
    async def main(place: Place) -> None:
        await trained(place)
        head = (await tape(place.shared))[-1].round
        payload = blob_key(head + 2, "a", SHA)
        await place.shared.put(payload, b"{}")
        await asyncio.sleep(DAY)

        class Waking(OneWriterMailbox):
            async def delete(self, key: str) -> None:
                assert key != payload
                await super().delete(key)

            def list(self, prefix: str, *, after: str = "") -> Any:
                if prefix == "live/leases/":
                    place.shared._store(LeaseKey("b", 99, "t", 0, "0" * 16).path, b"{}", replace=True)
                return super().list(prefix, after=after)

        await place.clean(3600.0, Waking(place.shared))
        assert payload in place.listed()

    at_place(main)


def test_while_a_node_joins_all_payloads_stay() -> None:
    async def main(place: Place) -> None:
        await trained(place)
        await place.clean()  # the nodes' own last snapshots, if a round stayed open
        left = await littered(place)
        await place.shared.put(LeaseKey("late", 0, "j", 0, "0" * 16).path, b"{}")
        found = kinds(await place.leftovers())
        assert "payloads" not in found and found["snapshots"] == left["snapshots"]

    at_place(main)


def test_a_record_that_is_not_found_keeps_its_fragments_payloads() -> None:
    async def main(place: Place) -> None:
        await trained(place)
        await place.clean()
        await littered(place)
        records = [record for record in await tape(place.shared) if record.round % 2 == 0]

        class Forgetful(OneWriterMailbox):
            async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
                lost = f"{records[-2].round:010d}-0"
                return None if key.endswith(lost) else await super().get(key, limit=limit)

        found = await place.leftovers(0.0, Forgetful(place.shared))
        assert kinds(found)["payloads"] == {blob_key(1, "loser", SHA), blob_key(5, "dead", SHA, compressed=True)}

    at_place(main)


class Dying(OneWriterMailbox):
    """Its process dies at the ``last`` removal."""

    def __init__(self, inner: Mailbox, last: int) -> None:
        super().__init__(inner)
        self.last = last

    async def delete(self, key: str) -> None:
        self.last -= 1
        if self.last < 0:
            raise MailboxUnavailable("gone")
        await super().delete(key)


@pytest.mark.parametrize("last", [0, 1, 5])
def test_a_cleaner_that_dies_harms_nothing_and_the_next_goes_on(last: int) -> None:
    async def main(place: Place) -> None:
        nodes = await trained(place)
        await littered(place)
        await asyncio.sleep(DAY)
        with pytest.raises(MailboxUnavailable):
            await place.clean(3600.0, Dying(place.shared, last))
        await intact(place, nodes)
        await asyncio.sleep(DAY)
        await place.clean(3600.0)
        assert kinds(await place.leftovers(3600.0)) == {}

    at_place(main)


@pytest.mark.parametrize(
    "settings", [SETTINGS, type(SETTINGS)(sync_every=20, fragments=2, commit_codec="BF16", full_every=3)]
)
def test_cleaning_all_the_time_without_any_patience_disturbs_no_run(settings: Any) -> None:
    """Harsher than the command ever is: nothing is too young, while nodes train, crash and join."""

    async def main(place: Place) -> None:
        nodes = [place.node(name, steps=400, min_nodes=3, settings=settings) for name in "abc"]
        ends = asyncio.ensure_future(ended([nodes[0], nodes[2]]))
        for second in range(200):
            await asyncio.sleep(0.7)
            if second == 10:
                await nodes[1].kill()
            if second == 20:
                nodes.append(place.node("late", steps=100, settings=settings))
            if place.listed("manifest.json"):
                await place.clean()
        await ends
        await ended([nodes[3]])
        assert await forks(place.shared) == []
        committed = await committed_parameters(place.shared)
        for name, values in nodes[0].model.values.items():
            assert np.array_equal(values, committed[name])

    at_place(main)


def test_a_half_created_run_goes_when_its_creator_is_gone() -> None:
    async def main(place: Place) -> None:
        keys = [blob_key(0, "a", SHA), creation_key(0), "probe/a-race", LeaseKey("a", 0, "j", 0, "0" * 16).path]
        for key in keys:
            await place.shared.put(key, b"{}")
        found = kinds(await place.leftovers())
        assert found == {}
        await asyncio.sleep(DAY)
        await place.clean(3600.0)
        assert place.listed() == []
        await trained(place, "a")

    at_place(main)


def test_a_prefix_of_something_else_is_refused() -> None:
    async def main(place: Place) -> None:
        await place.shared.put("photos/1.jpg", b"x")
        with pytest.raises(RunMismatch, match="is in use"):
            await place.leftovers()
        await place.shared.delete("photos/1.jpg")
        await place.shared.put("manifest.json", b"{}")
        await place.shared.put(blob_key(0, "a", SHA), b"x")
        with pytest.raises(RunMismatch, match="no manifest this library can read"):
            await place.leftovers()

    at_place(main)


def test_of_a_gossip_run_the_newest_rounds_and_means_stay() -> None:
    async def main(place: Place) -> None:
        nodes = [place.gossip(name, min_nodes=2) for name in "ab"]
        await all_ended(nodes)
        await place.clean()
        before = set(place.listed())
        left = {
            "shares": {ShareKey(1, "start", 0, "dead").path, ShareKey(1, "probe", 0, "dead").path, MeanKey(1, 0).path},
            "payloads": {blob_key(4, "dead", SHA), blob_key(0, "loser", SHA)},
        }
        for key in left["shares"] | left["payloads"]:
            await place.shared.put(key, b"{}")
        await asyncio.sleep(DAY)
        found = await place.leftovers(3600.0)
        assert {kind: keys & left.get(kind, set()) for kind, keys in kinds(found).items() if kind != "leases"} == left
        await place.clean(3600.0)
        means = [
            key for key in map(parse_gossip, place.listed("live/gossip/")) if isinstance(key, MeanKey) and key.full
        ]
        assert {key.fragment for key in means} == {0, 1}
        assert set(place.listed(BLOBS)) <= before
        newcomer = place.gossip("newcomer", steps=30)
        await all_ended([newcomer])
        assert np.isfinite(newcomer.model._flat).all()

    at_place(main)


def test_cleaning_a_gossip_run_all_the_time_disturbs_nobody() -> None:
    async def main(place: Place) -> None:
        nodes = [place.gossip(name, steps=300, min_nodes=2) for name in "abc"]
        ends = asyncio.ensure_future(all_ended([nodes[0], nodes[2]]))
        for second in range(60):
            await asyncio.sleep(0.6)
            if second == 10:
                await nodes[1].kill()
            if place.listed("manifest.json"):
                await place.clean()
        await ends
        assert not [event for node in nodes for _, event in node.events if "Ignored" in type(event).__name__]

    at_place(main)
