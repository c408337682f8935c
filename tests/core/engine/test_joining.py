"""Joining: one manifest whoever races or dies, refusals that explain themselves, the newest heads in few requests."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.joining import Found, checked, create_run, find_run, load_heads
from gradientmail_core.engine.learner import Commit
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.errors import RunMismatch, SchemaMismatch
from gradientmail_core.events import ObjectIgnored, PayloadSkipped, RunCreated, RunWaited
from gradientmail_core.mailbox import Faults, FaultyMailbox, MeteredMailbox, RetryingMailbox
from gradientmail_core.mailbox.base import Body, CreateOutcome
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import MANIFEST, LeaseKey, WantedKey, creation_key, tape_key
from gradientmail_core.protocol.records import Claim
from gradientmail_core.sim.checks import committed_parameters
from gradientmail_core.sim.store import SimulatedStore, Weather
from gradientmail_core.sim.world import ToyModel, ended
from gradientmail_core.tensors.schema import Schema, TensorSpec
from tests.core.engine.parts import SETTINGS, TIMEOUTS, Place, committed, created, first_head, virtually


async def create(host: Host, fill: float = 1.0) -> Found:
    """Create the run with every parameter at ``fill``, or wait for another's."""
    model = ToyModel(fill=fill)
    layouts = SETTINGS.partition.layouts(model.schema, SETTINGS.fragments)
    theta = [np.full(layout.size, fill, np.float32) for layout in layouts]
    return await create_run(host, SETTINGS, model.schema, None, layouts, theta)


class Stuck:
    """A mailbox whose creates of one key take effect ``seconds`` late, or never."""

    def __init__(self, place: Place, key: str, seconds: float = float("inf")) -> None:
        self._place = place
        self._key = key
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place.mailbox, name)

    async def create(self, key: str, body: Body) -> CreateOutcome:
        if key == self._key:
            await (asyncio.Event().wait() if self._seconds == float("inf") else asyncio.sleep(self._seconds))
        return await self._place.mailbox.create(key, body)


class Forgetful:
    """A mailbox that does not find one key the first ``times`` it is there."""

    def __init__(self, place: Place, key: str, times: int) -> None:
        self._place = place
        self._key = key
        self._times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place.mailbox, name)

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        body = await self._place.mailbox.get(key, limit=limit)
        if key == self._key and body is not None and self._times:
            self._times -= 1
            return None
        return body


async def beating(host: Host) -> None:
    """A joiner's lease, kept up."""
    for beat in range(1000):
        await host.mailbox.put(LeaseKey(host.node, beat, "j", 0, host.incarnation).path, b"{}")
        await host.clock.sleep(host.timeouts.period)


# -- is there a run? ---------------------------------------------------------------------------------------


def test_an_empty_prefix_holds_no_run() -> None:
    async def main(place: Place) -> None:
        assert await find_run(place.host()) is None
        await place.mailbox.put(creation_key(0), b"somebody is at it")
        await place.mailbox.put("live/leases/a/0000000000-j0-" + "0" * 16, b"{}")
        assert await find_run(place.host()) is None

    virtually(main)


def test_a_used_prefix_is_refused_with_what_it_holds() -> None:
    async def main(place: Place) -> None:
        await place.mailbox.put("photos/cat.jpg", b"...")
        with pytest.raises(RunMismatch, match=r"photos/cat\.jpg.* empty prefix"):
            await find_run(place.host())

    virtually(main)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b"[" * 10_000, b"plan"])
def test_a_manifest_that_cannot_be_read_is_refused(damage: bytes) -> None:
    async def main(place: Place) -> None:
        run = await created(place.host())
        plan = replace(run.manifest, plan=run.manifest.plan[:1] * 2).encoded()
        await place.mailbox.put(MANIFEST, plan if damage == b"plan" else damage)
        with pytest.raises(RunMismatch, match="no manifest this library can read"):
            await find_run(place.host())

    virtually(main)


# -- creation ----------------------------------------------------------------------------------------------


def test_a_manifest_names_only_what_is_there() -> None:
    async def main(place: Place) -> None:
        found = await create(place.host("a"), fill=2.0)
        assert found == await find_run(place.host("b"))
        assert found.manifest.closers == ("a", "a")
        parameters = await committed_parameters(place.mailbox)
        assert len(parameters) == 8 and all((values == 2.0).all() for values in parameters.values())
        assert {section.key for section in found.manifest.theta} == set(place.listed("blobs/"))
        assert [event.run for event in place.events(RunCreated)] == [found.manifest.run]

    virtually(main)


def check_one_run(place: Place, found: Sequence[Found]) -> None:
    assert len({one.digest for one in found}) == 1
    assert len(place.events(RunCreated)) == 1
    assert set(place.listed("blobs/")) == {section.key for section in found[0].manifest.theta}


@pytest.mark.parametrize("seed", range(4))
def test_eight_that_race_agree_on_one_run(seed: int) -> None:
    async def main(place: Place) -> None:
        weather = Weather(latency=0.2)
        hosts = [place.host(f"n{number}") for number in range(8)]
        hosts = [
            replace(host, mailbox=SimulatedStore(place.mailbox, host.clock, 10 * seed + number, weather))
            for number, host in enumerate(hosts)
        ]
        found = await asyncio.gather(*(create(host, fill=float(number)) for number, host in enumerate(hosts)))
        check_one_run(place, found)
        assert place.loop.time() < 10.0

    virtually(main)


@pytest.mark.parametrize("seed", range(3))
def test_eight_that_race_through_bad_weather_agree_on_one_run(seed: int) -> None:
    async def main(place: Place) -> None:
        faults = Faults(unavailable=0.1, undecided=0.2, lost_answer=0.2, slow=0.2, slowness=1.0)
        hosts = [place.host(f"n{number}") for number in range(8)]
        hosts = [
            replace(
                host,
                mailbox=RetryingMailbox(
                    FaultyMailbox(place.mailbox, host.clock, random.Random(100 * seed + number), faults),
                    host.clock,
                    random.Random(number),
                ),
            )
            for number, host in enumerate(hosts)
        ]
        keeping = [asyncio.ensure_future(beating(host)) for host in hosts]
        found = await asyncio.gather(*(create(host, fill=float(number)) for number, host in enumerate(hosts)))
        check_one_run(place, found)
        for task in keeping:
            task.cancel()

    virtually(main)


def test_a_creator_that_dies_before_the_manifest_is_replaced_after_one_lease() -> None:
    async def main(place: Place) -> None:
        stuck: Any = Stuck(place, MANIFEST)
        creator = asyncio.ensure_future(create(place.host("a", stuck), fill=1.0))
        await asyncio.sleep(1.0)
        assert place.listed("blobs/") and MANIFEST not in place.listed()
        others = asyncio.gather(*(create(place.host(name), fill=2.0) for name in ("b", "c")))
        creator.cancel()
        found = await others
        assert found[0] == found[1] and found[0].manifest.node in ("b", "c")
        assert TIMEOUTS.lease <= place.loop.time() - 1.0 <= TIMEOUTS.lease + 5.0
        assert all((values == 2.0).all() for values in (await committed_parameters(place.mailbox)).values())
        assert place.events(RunWaited)[0].reason == "waiting for a to create the run"

    virtually(main)


def test_a_creator_that_is_slow_and_beats_is_waited_for() -> None:
    async def main(place: Place) -> None:
        stuck: Any = Stuck(place, MANIFEST, seconds=5 * TIMEOUTS.lease)
        creator = place.host("a", stuck)
        keeping = asyncio.ensure_future(beating(creator))
        found = await asyncio.gather(create(creator), create(place.host("b")))
        assert found[0] == found[1] and found[0].manifest.node == "a"
        keeping.cancel()

    virtually(main)


def test_a_creator_that_was_given_up_joins_the_others_run_and_leaves_nothing() -> None:
    async def main(place: Place) -> None:
        stuck: Any = Stuck(place, MANIFEST, seconds=5 * TIMEOUTS.lease)
        found = await asyncio.gather(create(place.host("a", stuck), 1.0), create(place.host("b"), 2.0))
        assert found[0] == found[1] and found[0].manifest.node == "b"
        check_one_run(place, found)

    virtually(main)


def test_a_creator_that_left_is_replaced_at_once() -> None:
    async def main(place: Place) -> None:
        creator = place.host("a")
        await place.mailbox.create(creation_key(0), Claim("5a", "a", creator.incarnation, "0f").encoded())
        await place.mailbox.put(LeaseKey("a", 3, "x", 0, creator.incarnation).path, b"{}")
        assert (await create(place.host("b"))).manifest.node == "b"
        assert place.loop.time() < 1.0

    virtually(main)


def test_two_restarted_creators_do_not_wait_for_each_others_former_claims() -> None:
    async def main(place: Place) -> None:
        for number, node in enumerate("ab"):
            await place.mailbox.create(creation_key(number), Claim("5a", node, "dead", "0f").encoded())
        await ended([place.launch(name, steps=20) for name in "ab"])
        assert place.listed(MANIFEST) and place.loop.time() < 10.0

    virtually(main)


def test_a_restarted_creator_does_not_wait_for_its_former_self() -> None:
    async def main(place: Place) -> None:
        await place.mailbox.create(creation_key(0), Claim("5a", "a", "dead", "0f").encoded())
        assert (await create(place.host("a"))).manifest.node == "a"
        assert place.loop.time() == 0.0

    virtually(main)


def test_a_manifest_that_is_not_found_for_once_stops_no_creator() -> None:
    async def main(place: Place) -> None:
        found = await create(place.host("a", Forgetful(place, MANIFEST, times=2)))
        check_one_run(place, [found])

    virtually(main)


def test_a_question_longer_than_the_lease_time_out_does_not_decide_that_a_manifest_is_missing() -> None:
    class Slow(Forgetful):
        async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
            if key == MANIFEST and not self.slept:
                self.slept = True
                await asyncio.sleep(2 * TIMEOUTS.lease)
            return await super().get(key, limit=limit)

        slept = False

    async def main(place: Place) -> None:
        found = await create(place.host("a", Slow(place, MANIFEST, times=1)))
        check_one_run(place, [found])

    virtually(main)


def test_garbage_in_the_place_of_a_claim_holds_nobody_up() -> None:
    async def main(place: Place) -> None:
        for number in range(3):
            await place.mailbox.create(creation_key(number), b"garbage")
        await create(place.host("a"))
        assert place.loop.time() == 0.0 and creation_key(3) in place.listed()

    virtually(main)


# -- is it this run? ---------------------------------------------------------------------------------------


def test_the_same_model_and_settings_are_let_in() -> None:
    async def main(place: Place) -> None:
        found = await create(place.host())
        own = replace(SETTINGS, in_flight=1, overlap_steps=3, follow=False)
        run = checked(found, own, ToyModel().schema, None, "memory://run")
        assert (run.id, run.settings, run.layouts) == (found.manifest.run, own, found.layouts)

    virtually(main)


def test_another_model_is_refused_with_a_diff_of_bounded_length() -> None:
    async def main(place: Place) -> None:
        found = await create(place.host())
        wider = Schema.of(replace(tensor, shape=(17,)) for tensor in ToyModel().schema.tensors)
        with pytest.raises(SchemaMismatch) as refusal:
            checked(found, SETTINGS, wider, None, "memory://run")
        assert "block.0.weight [17] here, [16] in the run" in str(refusal.value)
        many = Schema.of(TensorSpec(f"layer.{number}", (2,)) for number in range(100))
        with pytest.raises(SchemaMismatch) as refusal:
            checked(found, SETTINGS, many, None, "memory://run")
        assert "and 96 more" in str(refusal.value) and len(str(refusal.value).splitlines()) < 20

    virtually(main)


def test_other_settings_are_refused_by_name() -> None:
    async def main(place: Place) -> None:
        found = await create(place.host())
        with pytest.raises(RunMismatch, match="quorum_size: 2 here, 1 in the run"):
            checked(found, replace(SETTINGS, quorum_size=2), ToyModel().schema, None, "memory://run")
        with pytest.raises(RunMismatch, match="frozen parameters"):
            checked(found, SETTINGS, ToyModel().schema, "0" * 64, "memory://run")

    virtually(main)


# -- the newest heads --------------------------------------------------------------------------------------


async def chains(host: Host, run: Run, lengths: dict[int, int]) -> dict[int, Head]:
    """Commit chains of such lengths; version v of fragment p has every parameter at 100 p + v."""
    heads = {fragment: first_head(run, fragment) for fragment in lengths}
    for fragment, length in lengths.items():
        for version in range(1, length + 1):
            heads[fragment] = await committed(host, run, heads[fragment], 100.0 * fragment + version)
    return heads


def check_loaded(commits: list[Commit], heads: dict[int, Head]) -> None:
    for fragment, head in heads.items():
        commit = commits[fragment]
        assert (commit.head.fragment, commit.head.version, commit.head.digest) == (fragment, head.version, head.digest)
        assert (commit.theta == 100.0 * fragment + head.version).all() and not commit.merged


@pytest.mark.parametrize("hints", [{}, {0: 40, 1: 5}, {0: 2 * 37}, {1: 2 * 9**9 + 1}, {0: 2 * 40 + 2}])
def test_the_newest_commits_are_loaded_whatever_the_hints_say(hints: dict[int, int]) -> None:
    async def main(place: Place) -> None:
        host = place.host()
        run = await created(host)
        heads = await chains(host, run, {0: 40, 1: 5})
        check_loaded(await load_heads(host, run, hints), heads)

    virtually(main)


def test_a_hint_that_names_another_fragments_round_misleads_nobody() -> None:
    async def main(place: Place) -> None:
        host = place.host()
        run = await created(host)
        heads = await chains(host, run, {0: 4, 1: 9})
        check_loaded(await load_heads(host, run, {0: heads[1].record.round if heads[1].record else 0}), heads)

    virtually(main)


def test_a_fresh_run_is_loaded_from_its_manifest() -> None:
    async def main(place: Place) -> None:
        host = place.host()
        run = await created(host, model=ToyModel(fill=3.0))
        commits = await load_heads(host, run, {})
        assert [commit.head.version for commit in commits] == [0, 0]
        assert all((commit.theta == 3.0).all() for commit in commits)

    virtually(main)


def test_a_joiners_heads_were_seen_when_it_joined() -> None:
    async def main(place: Place) -> None:
        host = place.host()
        run = await created(host)
        await chains(host, run, {0: 3, 1: 0})
        await host.clock.sleep(50.0)
        commits = await load_heads(host, run, {})
        assert {commit.head.seen for commit in commits} == {host.clock.now()}

    virtually(main)


@pytest.mark.parametrize("length", [10, 300])
def test_with_a_hint_joining_costs_the_same_at_any_age_of_the_run(length: int) -> None:
    async def main(place: Place) -> None:
        host = place.host()
        run = await created(host)
        await chains(host, run, {0: length, 1: length})
        metered = MeteredMailbox(place.mailbox)
        await load_heads(place.host("b", metered), run, {fragment: 2 * (length - 1) + fragment for fragment in (0, 1)})
        assert metered.usage.gets <= 2 * 5 and metered.usage.requests == metered.usage.gets

    virtually(main)


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_a_head_whose_payload_is_unreadable_is_waited_past(damage: str) -> None:
    async def main(place: Place) -> None:
        host = place.host()
        run = await created(host)
        heads = await chains(host, run, {0: 2, 1: 1})
        section = heads[0].section("theta")
        assert section is not None
        await place.mailbox.delete(section.key)
        if damage == "corrupt":
            await place.mailbox.put(section.key, b"garbage")
        loading = asyncio.ensure_future(load_heads(host, run, {}))
        await asyncio.sleep(5.0)
        assert not loading.done()
        assert {event.key for event in place.events(ObjectIgnored)} == {section.key}
        heads[0] = await committed(host, run, heads[0], 3.0)
        check_loaded(await loading, heads)

    virtually(main)


def test_a_joiner_that_stood_still_looks_again_before_it_takes_a_payload_for_lost() -> None:
    """Found by seed 287: a payload not found for once, then a process frozen while it told the others."""

    class Frozen(Forgetful):
        async def put(self, key: str, body: Body) -> None:
            if key == WantedKey(0).path:
                await asyncio.sleep(2 * TIMEOUTS.lease)
            await self._place.mailbox.put(key, body)

    async def main(place: Place) -> None:
        run = await created(place.host())
        joiner = place.host("b", Frozen(place, run.manifest.theta[0].key, times=1))
        assert [commit.head.version for commit in await load_heads(joiner, run, {})] == [0] * run.fragments
        assert place.events(PayloadSkipped) == []

    virtually(main)


def test_garbage_in_the_tape_is_passed() -> None:
    async def main(place: Place) -> None:
        host = place.host()
        run = await created(host)
        for version in range(1, 8):
            await place.mailbox.put(tape_key(2 * version, 0), b"garbage")
        heads = await chains(host, run, {0: 6, 1: 0})
        check_loaded((await load_heads(host, run, {}))[:1], {0: heads[0]})

    virtually(main)


def test_found_layouts_are_those_of_the_creator() -> None:
    async def main(place: Place) -> None:
        found = await create(place.host())
        assert not isinstance(found.layouts, Rejected)
        assert found.layouts == SETTINGS.partition.layouts(ToyModel().schema, 2)

    virtually(main)
