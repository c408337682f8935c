"""A node's life: its lease from j to x, its listings and uploads, and what others see when it ends badly."""

import asyncio
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gradientmail_core.engine.learner import Commit, Learner
from gradientmail_core.engine.life import LEAVING_SECONDS
from gradientmail_core.engine.node import Node
from gradientmail_core.engine.run import LEASES_KEPT_TIMEOUTS
from gradientmail_core.errors import MailboxDenied, RunMismatch, SchemaMismatch
from gradientmail_core.events import (
    BatchShareChanged,
    FragmentAligned,
    NodeGone,
    ObjectIgnored,
    RoundTakenOver,
    RunJoined,
    RunWaited,
    SessionEnded,
    SnapshotPublished,
    SnapshotRefused,
)
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.mailbox.base import Body
from gradientmail_core.protocol.keys import DeltaKey, LeaseKey, parse_live
from gradientmail_core.sim.checks import committed_parameters, forks, tape
from gradientmail_core.sim.loop import VirtualClock
from gradientmail_core.sim.store import SimulatedStore, Weather
from gradientmail_core.sim.world import SimulatedNode, ToyModel, ended
from gradientmail_core.tensors.schema import Schema, TensorSpec
from tests.core.engine.parts import SETTINGS, TIMEOUTS, Place, taken, virtually

QUICK = replace(SETTINGS, grace_seconds=0.3)


class Recorded(MemoryMailbox):
    """Remembers every key that was written, in order."""

    def __init__(self) -> None:
        super().__init__("run")
        self.written: list[str] = []

    async def put(self, key: str, body: Body) -> None:
        self.written.append(key)
        await super().put(key, body)

    def beats(self, node: str) -> list[LeaseKey]:
        keys = [parse_live(key) for key in self.written]
        return [key for key in keys if isinstance(key, LeaseKey) and key.node == node]


async def entered(
    place: Place, name: str = "a", *, start: bool = True, **options: Any
) -> tuple[Node, Learner, list[Commit]]:
    """A node that has joined, with a learner on a toy model; its tasks run if ``start``."""
    host = options.pop("host", None) or place.host(name)
    node, model = Node(host, QUICK, **options), ToyModel()
    layouts = QUICK.partition.layouts(model.schema, QUICK.fragments)
    theta = [np.zeros(layout.size, np.float32) for layout in layouts]
    commits = await node.join(await node.enter(), model.schema, None, layouts, theta)
    await node.wait_for_nodes()
    learner = Learner(
        model, node.layouts, commits, in_flight=2, overlap_steps=None, publish=node.publish,
        applied=lambda commit: None, now=host.clock.now,
    )  # fmt: skip
    if start:
        node.start(learner, commits, lambda failure: None)
    return node, learner, commits


# -- the lease ---------------------------------------------------------------------------------------------


def test_a_life_goes_from_joining_to_gone_with_growing_beats() -> None:
    async def main(place: Place) -> None:
        place.mailbox = recorded = Recorded()
        await ended([place.launch("a", settings=QUICK, steps=100, min_nodes=1)])
        beats = recorded.beats("a")
        states = [beat.state for beat in beats]
        assert states[0] == "j" and states[-2:] == ["d", "x"] and set(states[1:-2]) == {"t"}
        assert [beat.beat for beat in beats] == list(range(len(beats)))
        assert [beat.step for beat in beats] == sorted(beat.step for beat in beats) and beats[-1].step == 100
        assert len({beat.tag for beat in beats}) == 1

    virtually(main)


def test_the_last_two_beats_stay_and_no_more() -> None:
    async def main(place: Place) -> None:
        node = place.launch("a", settings=replace(QUICK, sync_every=1000), steps=600)
        for _ in range(10):
            await asyncio.sleep(5.0)
            assert len(place.listed("live/leases/a/")) <= 3
        await ended([node])
        left = place.listed("live/leases/a/")
        assert len(left) <= 3 and left[-1].split("-")[1][0] == "x"

    virtually(main)


def test_a_beat_that_lands_after_it_was_replaced_does_not_stay() -> None:
    async def main(place: Place) -> None:
        node = place.launch("a", settings=replace(QUICK, sync_every=1000), steps=600)
        await asyncio.sleep(20.0)
        late = place.listed("live/leases/a/")[-1]
        await asyncio.sleep(10.0)
        assert late not in place.listed("live/leases/a/")
        await place.mailbox.put(late, b"{}")
        await asyncio.sleep(2 * TIMEOUTS.period)
        assert late not in place.listed("live/leases/a/")
        await ended([node])

    virtually(main)


def test_what_a_node_publishes_counts_as_its_beat() -> None:
    async def main(place: Place) -> None:
        place.mailbox = recorded = Recorded()
        busy = [place.launch(name, settings=QUICK, steps=600, min_nodes=2) for name in ("a", "b")]
        await asyncio.sleep(55.0)
        assert len(recorded.beats("a")) < 8, "it publishes every second and need not beat"
        await ended(busy)
        assert not [event for event in place.events(NodeGone) if not event.left]

    virtually(main)


class Cutting(Recorded):
    """Loses the last byte of every snapshot of ``b``."""

    async def put(self, key: str, body: Body) -> None:
        cut = key.startswith("live/deltas/") and key.endswith("/b")
        await super().put(key, body[:-1] if cut else body)


def test_a_node_whose_snapshots_are_refused_lives_all_the_same() -> None:
    """Nobody takes a refused snapshot for a sign of life, so its node must not go by it either."""

    async def main(place: Place) -> None:
        place.mailbox = recorded = Cutting()
        roles = {"a": "both", "b": "learner"}
        busy = [place.launch(n, settings=QUICK, steps=600, min_nodes=2, role=role) for n, role in roles.items()]
        await ended(busy)
        assert not [event for event in place.events(NodeGone) if not event.left]
        assert len(recorded.beats("b")) > 60.0 / TIMEOUTS.lease * 3, "it beats"
        refusals = [refusal.node for record in await tape(place.mailbox) for refusal in record.refusals]
        assert refusals.count("b") > 40, "and is told why, round after round"

    virtually(main)


def test_a_restarted_node_goes_on_after_its_highest_beat_and_clears_the_old_ones() -> None:
    async def main(place: Place) -> None:
        place.mailbox = recorded = Recorded()
        first = place.launch("a", settings=replace(QUICK, sync_every=1000), steps=10_000)
        await asyncio.sleep(20.0)
        await first.kill()
        before = [beat.beat for beat in recorded.beats("a")]
        second = place.launch("a", settings=replace(QUICK, sync_every=1000), steps=10_000)
        await asyncio.sleep(20.0)
        after = [beat.beat for beat in recorded.beats("a")][len(before) :]
        assert after == list(range(max(before) + 1, max(before) + 1 + len(after))) and len(after) > 3
        left = [parse_live(key) for key in place.listed("live/leases/a/")]
        assert len({key.tag for key in left if isinstance(key, LeaseKey)}) == 1
        await second.kill()

    virtually(main)


def test_a_node_that_left_is_buried_and_may_come_back_under_its_name() -> None:
    async def main(place: Place) -> None:
        stays = place.launch("a", settings=QUICK, steps=1200, min_nodes=2)
        leaves = place.launch("b", settings=QUICK, steps=400)
        await leaves.task  # type: ignore[misc]  # it was begun
        await asyncio.sleep(2 * TIMEOUTS.lease)
        assert not place.listed("live/leases/b/"), "buried"
        returned = place.launch("b", settings=QUICK, steps=200)
        await asyncio.sleep(TIMEOUTS.lease)
        assert stays.engine is not None and stays.engine.board.live_learners() == ("a", "b")
        before = len(await tape(place.mailbox))
        await ended([returned])
        newer = (await tape(place.mailbox))[before:]
        assert any("b" in {participant.node for participant in record.participants} for record in newer)
        await ended([stays])

    virtually(main)


def test_a_dead_node_is_buried_after_ten_leases() -> None:
    async def main(place: Place) -> None:
        slow = replace(QUICK, sync_every=10)
        stays = place.launch("a", settings=slow, steps=200, step_seconds=1.0, min_nodes=2)
        dies = place.launch("b", settings=slow, steps=200, step_seconds=1.0)
        await asyncio.sleep(30.0)
        await dies.kill()
        await asyncio.sleep((LEASES_KEPT_TIMEOUTS - 1) * TIMEOUTS.lease)
        assert place.listed("live/leases/b/")
        await asyncio.sleep(2 * TIMEOUTS.lease)
        assert not place.listed("live/leases/b/")
        await ended([stays])

    virtually(main)


# -- entering ----------------------------------------------------------------------------------------------


def test_training_waits_for_the_nodes_it_should_begin_with() -> None:
    async def main(place: Place) -> None:
        first = place.launch("a", settings=QUICK, steps=40, min_nodes=3)
        second = place.launch("b", settings=QUICK, steps=40, min_nodes=3)
        await asyncio.sleep(100.0)
        assert first.learner is None and second.learner is None
        waits = [event.reason for name, event in place.log if name == "a" and isinstance(event, RunWaited)]
        assert waits[-1] == "waiting for 1 more node(s) (have: a, b)"
        assert 4 <= len(waits) <= 6, "at growing intervals"
        third = place.launch("c", settings=QUICK, steps=40, min_nodes=3)
        await ended([first, second, third])
        assert all(len(record.participants) == 3 for record in (await tape(place.mailbox))[:2])

    virtually(main)


def test_a_run_that_has_begun_waits_for_nobody() -> None:
    async def main(place: Place) -> None:
        await ended([place.launch("a", settings=QUICK, steps=40)])
        late = place.launch("b", settings=QUICK, steps=40, min_nodes=5)
        await ended([late])
        joined = [event for event in place.events(RunJoined) if event.node == "b"]
        assert joined[0].rounds == 4 and joined[0].step >= 40
        assert late.learner is not None and late.learner.state.global_step >= 80

    virtually(main)


def test_another_model_or_run_is_refused_before_anything_is_trained() -> None:
    async def main(place: Place) -> None:
        await ended([place.launch("a", settings=QUICK, steps=20)])
        other = place.launch("b", settings=QUICK, model=ToyModel(tensors=3))
        with pytest.raises(SchemaMismatch):
            await ended([other])
        with pytest.raises(RunMismatch):
            await ended([place.launch("c", settings=replace(QUICK, sync_every=30))])
        schema = Schema.of([TensorSpec("w", (3,))])
        with pytest.raises(SchemaMismatch):
            node = Node(place.host("d"), QUICK)
            await node.join(await node.enter(), schema, None, (), ())

    virtually(main)


# -- working -----------------------------------------------------------------------------------------------


def test_a_snapshot_is_uploaded_and_told_and_its_buffer_comes_back() -> None:
    async def main(place: Place) -> None:
        node, learner, commits = await entered(place)
        snapshot = taken(node._run, commits[0].head, 1.0)  # type: ignore[arg-type]  # it has joined
        node.publish(snapshot)
        await asyncio.sleep(0.5)
        (told,) = place.events(SnapshotPublished)
        assert (told.fragment, told.round, told.steps, told.tokens) == (0, 2, 20, 160)
        assert learner._spare[0][0] is snapshot.values
        await node.stop()

    virtually(main)


def test_a_snapshot_of_a_version_that_is_past_is_not_uploaded() -> None:
    async def main(place: Place) -> None:
        node, learner, commits = await entered(place)
        node.publish(taken(node._run, commits[0].head, 1.0, version=5))  # type: ignore[arg-type]  # it has joined
        assert [(event.round, event.reason) for event in place.events(SnapshotRefused)] == [(12, "stale")]
        assert len(learner._spare[0]) == 1
        await node.stop()  # as a node does that leaves at once
        assert not place.listed("live/deltas/")

    virtually(main)


def test_strange_objects_are_reported_once() -> None:
    async def main(place: Place) -> None:
        await place.mailbox.put("live/somebody/elses", b"...")
        node, _, _ = await entered(place)
        await asyncio.sleep(5 * TIMEOUTS.period)
        assert [event.key for event in place.events(ObjectIgnored)] == ["live/somebody/elses"]
        await node.stop()

    virtually(main)


def test_what_changes_stays_within_its_bound() -> None:
    async def main(place: Place) -> None:
        nodes = [place.launch(name, settings=QUICK, steps=400, min_nodes=3) for name in ("a", "b", "c")]
        bound = (2 + QUICK.in_flight) * len(nodes) + 2 * QUICK.fragments + len(nodes)
        for _ in range(30):
            await asyncio.sleep(1.0)
            assert len(place.listed("live/")) <= bound, place.listed("live/")
        await ended(nodes)

    virtually(main)


def test_a_store_that_is_away_for_a_minute_costs_a_minute() -> None:
    async def main(place: Place) -> None:
        node = place.launch("a", settings=QUICK, steps=1000)
        await asyncio.sleep(10.0)
        store: Any = node.mailbox
        assert isinstance(store, SimulatedStore)
        store.up = False
        await asyncio.sleep(60.0)
        before = len(await tape(place.mailbox))
        store.up = True
        await asyncio.sleep(20.0)
        assert len(await tape(place.mailbox)) > before + 2
        await ended([node])
        assert node.engine is not None and node.engine.failure is None
        assert not await forks(place.mailbox)

    virtually(main)


def test_a_lasting_refusal_is_told_once_and_ends_the_node() -> None:
    class Denying(MemoryMailbox):
        async def put(self, key: str, body: Body) -> None:
            if key.startswith("live/deltas/"):
                raise MailboxDenied("The bucket is read-only.")
            await super().put(key, body)

    async def main(place: Place) -> None:
        place.mailbox = Denying("run")
        failures: list[BaseException] = []
        node, learner, commits = await entered(place, start=False)
        node.start(learner, commits, failures.append)
        for fragment in (0, 1):
            node.publish(taken(node._run, commits[fragment].head, 1.0))  # type: ignore[arg-type]  # it has joined
        await asyncio.sleep(1.0)
        assert len(failures) == 1 and node.failure is failures[0] and isinstance(failures[0], MailboxDenied)
        await node.stop()

    virtually(main)


# -- shares of the batch -----------------------------------------------------------------------------------


def test_equal_shares_are_rounded_up_and_change_when_nodes_come_and_go() -> None:
    async def main(place: Place) -> None:
        settings = replace(QUICK, global_batch_size=64)
        nodes = {name: place.launch(name, settings=settings, steps=10**6, min_nodes=3) for name in "abc"}
        await asyncio.sleep(2 * TIMEOUTS.lease)

        def share(name: str) -> int | None:
            engine = nodes[name].engine
            return engine.batch_share if engine is not None else None

        assert [share(name) for name in "abc"] == [22, 22, 22]
        await nodes["b"].kill()
        await asyncio.sleep(TIMEOUTS.lease + TIMEOUTS.period)
        assert [share(name) for name in "ac"] == [32, 32]
        nodes["d"] = place.launch("d", settings=settings, steps=10**6)
        nodes["e"] = place.launch("e", settings=settings, steps=10**6)
        await asyncio.sleep(TIMEOUTS.lease + TIMEOUTS.period)  # to a joiner the dead one is new
        assert [share(name) for name in "acde"] == [16] * 4
        told = [(event.samples, event.nodes) for event in place.events(BatchShareChanged) if event.node == "a"]
        assert told[-1] == (16, 4) and (32, 2) in told and (22, 3) in told
        for node in nodes.values():
            await node.kill()

    virtually(main)


def test_shares_by_speed_add_up_settle_and_change_when_a_node_dies() -> None:
    async def main(place: Place) -> None:
        settings = replace(QUICK, quorum_size=3, global_batch_size=70, share="speed")
        costs = {"a": 0.004, "b": 0.004, "c": 0.016}
        nodes = {name: place.launch(name, settings=settings, steps=10**6, min_nodes=3) for name in costs}

        def heard(node: Any, event: Any) -> None:
            place.log.append((node.name, event))
            if isinstance(event, BatchShareChanged):
                node.tokens, node.step_seconds = event.samples, event.samples * costs[node.name]

        for node in nodes.values():
            node.on_event = partial(heard, node)
        await asyncio.sleep(60.0)

        def shares(names: str) -> list[int]:
            engines = [nodes[name].engine for name in names]
            return [engine.batch_share or 0 for engine in engines if engine is not None]

        a, _, c = shares("abc")
        assert sum(shares("abc")) == 70 and a >= 3 * c
        changes = len(place.events(BatchShareChanged))
        await asyncio.sleep(60.0)
        assert len(place.events(BatchShareChanged)) == changes <= 3 * 5, "they do not flap"
        await nodes["a"].kill()
        await asyncio.sleep(TIMEOUTS.lease + 10.0)
        b, c = shares("bc")
        assert b + c == 70 and b >= 3 * c
        for node in nodes.values():
            await node.kill()

    virtually(main)


# -- leaving -----------------------------------------------------------------------------------------------


def test_a_leaving_closer_hands_over_so_that_nobody_waits_for_its_lease() -> None:
    async def main(place: Place) -> None:
        commits: dict[str, list[float]] = {}
        leaves = place.launch("a", settings=QUICK, steps=200, min_nodes=2)
        stays = place.launch("b", settings=QUICK, steps=500, min_nodes=2)
        stays.on_commit = lambda commit: commits.setdefault("b", []).append(place.loop.time())
        await ended([leaves])
        left_at = place.loop.time()
        await ended([stays])
        after = [moment for moment in commits["b"] if moment > left_at - 3.0]
        assert max(later - earlier for earlier, later in pairwise(after)) < TIMEOUTS.lease / 2
        assert [event.node for event in place.events(NodeGone) if event.left] == ["a"]

    virtually(main)


def test_what_a_leaving_node_closes_last_it_hands_over() -> None:
    async def main(place: Place) -> None:
        one = replace(QUICK, fragments=1)
        leaves = place.launch("a", settings=one, steps=100, min_nodes=2)
        stays = place.launch("b", settings=one, steps=150, min_nodes=2)
        await ended([leaves, stays])
        records = await tape(place.mailbox)
        assert [record.closer for record in records] == ["a"] * 4 + ["b"] * (len(records) - 4)
        assert records[4].node == "a" and not place.events(RoundTakenOver)

    virtually(main)


@pytest.mark.parametrize("seed", [10, 20, 25, 30, 40])
@pytest.mark.parametrize("steps", [(100, 100), (100, 140), (140, 100)])
def test_the_last_snapshots_of_who_leaves_are_merged_however_long_they_upload(
    seed: int, steps: tuple[int, int]
) -> None:
    async def main(place: Place) -> None:
        place.seeds, place.weather = seed, Weather(bandwidth=1000.0)
        both = replace(QUICK, fragments=1, quorum_size=2)
        nodes = [
            place.launch(name, settings=both, steps=count, step_seconds=0.5, min_nodes=2)
            for name, count in zip("ab", steps, strict=True)
        ]
        await ended(nodes)
        merged = {(who.node, record.round) for record in await tape(place.mailbox) for who in record.participants}
        published = {
            (node.name, event.round)
            for node in nodes
            for _, event in node.events
            if isinstance(event, SnapshotPublished)
        }
        assert published <= merged and len(published) >= 8 and not place.events(SnapshotRefused)

    virtually(main)


@pytest.mark.parametrize("flush", [False, True])
def test_who_flushes_leaves_no_step_behind(flush: bool) -> None:
    async def main(place: Place) -> None:
        both = replace(QUICK, overlap_steps=0, quorum_size=2, flush_on_close=flush)
        nodes = [place.launch(name, settings=both, steps=95, min_nodes=2) for name in ("a", "b")]
        await ended(nodes)
        records = await tape(place.mailbox)
        merged = [sum(who.steps for record in records[p::2] for who in record.participants) for p in (0, 1)]
        assert (sum(merged) == 2 * 2 * 95) is flush
        assert any(record.final for record in records) is flush

    virtually(main)


def test_last_snapshots_in_the_middle_of_a_cycle_wait_for_the_others() -> None:
    async def main(place: Place) -> None:
        stays = place.launch("a", settings=replace(QUICK, sync_every=100), steps=500, min_nodes=2)
        leaves = place.launch("b", settings=replace(QUICK, sync_every=100, flush_on_close=True), steps=330, min_nodes=2)
        await ended([leaves])
        assert 35.0 < place.loop.time() < 45.0, "it leaves with the rounds of the cycle it was in"
        await ended([stays])
        records = await tape(place.mailbox)
        last = [record for record in records if "b" in {who.node for who in record.participants}][-2:]
        assert all({who.node for who in record.participants} == {"a", "b"} and not record.final for record in last)
        assert not place.events(RoundTakenOver) and all(record.next_step - record.step == 100 for record in records)

    virtually(main)


def test_who_leaves_holds_what_was_committed() -> None:
    async def main(place: Place) -> None:
        nodes = [place.launch(name, settings=QUICK, steps=100, min_nodes=2) for name in ("a", "b")]
        await ended(nodes)
        parameters = await committed_parameters(place.mailbox)
        assert all(np.array_equal(values, parameters[name]) for name, values in nodes[1].model.values.items())
        assert {event.node for event in place.events(SessionEnded)} == {"a", "b"}

    virtually(main)


def test_an_abort_releases_the_lease_and_writes_nothing_more() -> None:
    async def main(place: Place) -> None:
        place.mailbox = recorded = Recorded()
        node, _, commits = await entered(place)
        node.publish(taken(node._run, commits[0].head, 1.0))  # type: ignore[arg-type]  # it has joined
        await node.abort("the loss is a smiley")
        assert recorded.beats("a")[-1].state == "x"
        assert DeltaKey(2, "a").path not in place.listed("live/deltas/")
        before = len(recorded.written)
        await asyncio.sleep(60.0)
        assert len(recorded.written) == before
        assert [event.reason for event in place.events(SessionEnded)] == ["the loss is a smiley"]

    virtually(main)


def test_an_abort_does_not_wait_for_a_silent_store() -> None:
    class Silent(MemoryMailbox):
        silent = False

        async def put(self, key: str, body: Body) -> None:
            if self.silent:
                await asyncio.Event().wait()
            await super().put(key, body)

    async def main(place: Place) -> None:
        place.mailbox = silent = Silent("run")
        node, _, _ = await entered(place)
        silent.silent = True
        before = place.loop.time()
        await node.abort("power cut")
        assert place.loop.time() - before <= LEAVING_SECONDS

    virtually(main)


def test_counters_are_those_of_the_newest_commits() -> None:
    async def main(place: Place) -> None:
        node = place.launch("a", settings=QUICK, steps=100)
        await ended([node])
        assert node.engine is not None
        records = await tape(place.mailbox)
        assert node.engine.rounds_seen == len(records) == 10
        assert node.engine.merged_tokens == sum(record.merged_tokens for record in records[-2:]) // 2
        assert node.engine.live_learners == 1
        assert not place.events(FragmentAligned), "the session tells of alignments, not the node"

    virtually(main)


def test_a_late_beat_of_a_dead_process_is_not_taken_for_a_namesake() -> None:
    async def main(place: Place) -> None:
        victim = place.launch("a", settings=QUICK, steps=1000)
        await asyncio.sleep(5)
        await victim.kill()
        again = place.launch("a", settings=QUICK, steps=200)
        await asyncio.sleep(3)
        assert again.engine is not None
        late = LeaseKey("a", again.engine._lease.newest.beat + 4, "t", 9, "0a" * 8)
        await place.mailbox.put(late.path, b"{}")
        await ended([again])

    virtually(main)


def test_a_node_cut_off_while_it_joins_is_not_taken_for_one_that_overwrites() -> None:
    """Its beats go on meanwhile, and the one that it would create again is removed as too old."""

    class CutOff(SimulatedStore):
        """Holds the first create of a beat back until a few beats have passed."""

        async def create(self, key: str, body: Any) -> Any:
            if key.startswith("live/leases/") and not held:
                held.append(key)
                await asyncio.sleep(10)
            return await super().create(key, body)

    held: list[str] = []

    async def main(place: Place) -> None:
        clock = VirtualClock(place.loop)
        store = CutOff(place.mailbox, clock, 1, place.weather)
        node = SimulatedNode("a", store, SETTINGS, clock, 1, 30, timeouts=TIMEOUTS).launch()
        assert node.task is not None
        await node.task
        assert held and held[0] not in place.listed("live/leases/")

    virtually(main)
