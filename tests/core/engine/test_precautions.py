"""Stores that cannot decide a race: refused, or used by one closer, or by one named syncer; and said plainly."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gradientmail_core.engine.joining import find_run
from gradientmail_core.engine.node import Node
from gradientmail_core.engine.precautions import StoreNature, guarded, probed, refuse_overwriting
from gradientmail_core.errors import MailboxUnavailable, MailboxUnsupported, RunMismatch
from gradientmail_core.events import RoundTakenOver, RunWaited
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.mailbox.careful import SETTLED_SECONDS
from gradientmail_core.protocol.keys import tape_key
from gradientmail_core.protocol.records import Manifest
from gradientmail_core.sim.checks import forks, manifest_of, tape
from gradientmail_core.sim.world import SimulatedNode, ToyModel
from tests.core.engine.parts import SETTINGS, Place, created, virtually
from tests.core.mailbox.defective import Ignoring, Incapable, Racing, Remembering

QUICK = replace(SETTINGS, overlap_steps=10, quorum_size=2)


async def ended(nodes: Sequence[SimulatedNode]) -> None:
    await asyncio.gather(*(node.task for node in nodes if node.task is not None))


async def manifest(place: Place) -> Manifest:
    return (await manifest_of(place.mailbox))[0]


def test_an_honest_store_needs_none() -> None:
    async def main(place: Place) -> None:
        host = place.host()
        assert await probed(host) == StoreNature("atomic", listed=False)
        assert guarded(host, StoreNature("atomic", listed=False)) is host.mailbox
        assert place.listed() == []

    virtually(main)


@pytest.mark.parametrize("store", [Ignoring, Incapable])
def test_a_store_without_a_condition_is_refused_and_left_as_it_was(store: type[MemoryMailbox]) -> None:
    async def main(place: Place) -> None:
        place.mailbox = store("run")
        with pytest.raises(MailboxUnsupported):
            await created(place.host())
        assert place.listed() == []

    virtually(main)


def test_the_refusal_says_why_and_what_to_do() -> None:
    async def main(place: Place) -> None:
        place.mailbox = Ignoring("run")
        with pytest.raises(MailboxUnsupported) as caught:
            await created(place.host())
        assert "overwrote" in caught.value.cause
        assert "gradientmail doctor" in caught.value.remedy and "syncer=" in caught.value.remedy

    virtually(main)


def test_a_probe_that_does_not_settle_is_repeated() -> None:
    class Hiding(MemoryMailbox):
        hidden = 2

        async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
            if key.startswith("probe/") and self.hidden:
                self.hidden -= 1
                raise MailboxUnavailable("503")
            return await super().get(key, limit=limit)

    async def main(place: Place) -> None:
        place.mailbox = Hiding("run")
        assert (await probed(place.host())).store == "atomic"

    virtually(main)


def test_a_joiner_whose_way_to_the_store_drops_the_condition_is_refused() -> None:
    async def main(place: Place) -> None:
        run = await created(place.host("a"))
        gateway = Ignoring("run")
        for part in ("_objects", "_keys", "_listing"):
            setattr(gateway, part, getattr(place.mailbox, part))
        node, model = Node(place.host("b", gateway), SETTINGS), ToyModel()
        found = await node.enter()
        with pytest.raises(MailboxUnsupported, match="overwrites what exists"):
            await node.join(found, model.schema, None, (), ())
        kept = await find_run(place.host())
        assert kept is not None and kept.digest == run.digest

    virtually(main)


def test_a_beat_swept_while_it_was_asked_about_accuses_no_store() -> None:
    async def main(place: Place) -> None:
        await refuse_overwriting(place.host(), "live/leases/a/0000000000-j0-0")
        assert place.listed() == []

    virtually(main)


def test_where_creates_race_one_node_closes_all_and_another_takes_over_only_from_the_dead() -> None:
    async def main(place: Place) -> None:
        place.mailbox = Racing("run")
        place.mailbox.gap = 0.1
        nodes = [place.launch(name, settings=QUICK, steps=200, step_seconds=0.5, min_nodes=3) for name in "abc"]
        while not (place.listed("manifest") and len(await tape(place.mailbox)) >= 6):
            await asyncio.sleep(1.0)
        assert (await manifest(place)).store == "racy"
        before = await tape(place.mailbox)
        (first,) = {record.node for record in before}
        await next(node for node in nodes if node.name == first).kill()
        await ended([node for node in nodes if node.name != first])
        records = await tape(place.mailbox)
        assert await forks(place.mailbox) == []
        reasons = {event.reason for event in place.events(RoundTakenOver)}
        assert reasons == {"no sign of life"}
        later = records[len(before) + 2 * QUICK.fragments :]  # each fragment may first be taken over by another node
        assert len({record.node for record in later if record.step < 150}) == 1
        assert {record.node for record in later} <= set("abc") - {first}

    virtually(main)


def test_the_named_syncer_creates_and_closes_everything_without_a_condition() -> None:
    async def main(place: Place) -> None:
        place.mailbox = Incapable("run")
        b = place.launch("b", settings=QUICK, steps=100, syncer="a")
        await asyncio.sleep(5.0)
        assert not place.listed("manifest") and "waiting for a, the syncer" in str(place.events(RunWaited)[0])
        a = place.launch("a", settings=QUICK, steps=100, syncer="a")
        while not place.listed("manifest"):
            await asyncio.sleep(1.0)
        c = place.launch("c", settings=QUICK, steps=80)
        await ended([a, b, c])
        records = await tape(place.mailbox)
        assert (await manifest(place)).store == "none"
        assert len(records) >= 6 and {record.node for record in records} == {"a"} == {r.closer for r in records}
        assert {part.node for record in records for part in record.participants} >= {"a", "b"}
        assert not place.events(RoundTakenOver) and await forks(place.mailbox) == []

    virtually(main)


@pytest.mark.parametrize(("creator", "joiner"), [("a", "b"), (None, "a")])
def test_another_syncer_than_the_runs_is_refused(creator: str | None, joiner: str) -> None:
    async def main(place: Place) -> None:
        first = place.launch("a", steps=20, syncer=creator)
        await ended([first])
        node = place.launch("b", steps=20, syncer=joiner)
        with pytest.raises(RunMismatch, match="syncer"):
            await ended([node])

    virtually(main)


def test_a_store_that_remembers_absence_is_asked_for_listings_first() -> None:
    async def main(place: Place) -> None:
        place.mailbox = Remembering("run")
        nodes = [place.launch(name, settings=QUICK, steps=100, min_nodes=2) for name in "ab"]
        await ended(nodes)
        assert (await manifest(place)).listed
        records = await tape(place.mailbox)
        assert len(records) >= 6 and {len(record.participants) for record in records} == {2}

    virtually(main)


def test_a_record_that_was_replaced_under_its_closer_is_what_the_chain_goes_on_from() -> None:
    async def main(place: Place) -> None:
        place.mailbox = Racing("run")
        place.mailbox.gap = 0.1
        nodes = [place.launch(name, settings=QUICK, steps=150, step_seconds=0.5, min_nodes=2) for name in "ab"]
        while not (place.listed("manifest") and len(await tape(place.mailbox)) >= 4):
            await asyncio.sleep(0.2)
        newest = (await tape(place.mailbox))[-1]
        await asyncio.sleep(SETTLED_SECONDS + 0.5)  # its closer has read it back, and acts on it
        other = replace(newest, nonce="0e" * 8)
        await place.mailbox.put(tape_key(newest.round, 0), other.encoded())
        await ended(nodes)
        records = await tape(place.mailbox)
        assert other in records and records[-1].round > newest.round + 2
        assert await forks(place.mailbox) == []

    virtually(main)
