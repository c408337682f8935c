"""The judge sees what it is there to see; runs without a fault are in tests/scenarios."""

from collections.abc import Awaitable, Callable

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.learner import Commit
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.sim.judge import Judge
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.world import SimulatedNode, ended

SETTINGS = DiLoCo(sync_every=4, fragments=2)


def judged(harm: Callable[[MemoryMailbox, Judge, SimulatedNode], Awaitable[None]]) -> list[str]:
    """What the judge says of a run of one node to whose store ``harm`` was done after it."""

    async def main(loop: VirtualLoop) -> list[str]:
        store = MemoryMailbox("judged")
        judge = Judge(SETTINGS, loop, store)
        node = SimulatedNode("a", store, SETTINGS, VirtualClock(loop), seed=1, steps=20)
        node.on_commit = judge.applied
        judge.born(node)
        await ended([node.launch()])
        await harm(store, judge, node)
        await judge.conclude()
        return judge.violations

    return run_virtually(main)


async def first_key(store: MemoryMailbox, prefix: str, last: bool = False) -> str:
    keys = sorted([entry.key async for entry in store.list(prefix)])
    return keys[-1 if last else 0]


def test_an_untouched_run_is_clean() -> None:
    async def nothing(store: MemoryMailbox, judge: Judge, node: SimulatedNode) -> None:
        pass

    assert judged(nothing) == []


def test_a_missing_record_is_a_gap() -> None:
    async def lose_a_record(store: MemoryMailbox, judge: Judge, node: SimulatedNode) -> None:
        await store.delete(await first_key(store, "tape/"))

    assert any("does not follow" in violation for violation in judged(lose_a_record))


def test_a_missing_payload_is_seen() -> None:
    async def lose_a_payload(store: MemoryMailbox, judge: Judge, node: SimulatedNode) -> None:
        await store.delete(await first_key(store, "blobs/", last=True))

    assert any("misses a payload" in violation for violation in judged(lose_a_payload))


def test_a_model_off_its_commit_is_seen() -> None:
    async def nudge(store: MemoryMailbox, judge: Judge, node: SimulatedNode) -> None:
        next(iter(node.model.values.values()))[0] += 1.0

    assert any("other parameters" in violation for violation in judged(nudge))


def test_two_contents_of_one_version_are_seen() -> None:
    async def act_twice(store: MemoryMailbox, judge: Judge, node: SimulatedNode) -> None:
        assert node.engine is not None and node.learner is not None
        fragment = node.engine.fragments[0]
        judge.applied(Commit(fragment.head, fragment.theta, merged=True))
        judge.applied(Commit(fragment.head, fragment.theta + 1, merged=True))

    assert any("two contents" in violation for violation in judged(act_twice))
