"""A node that only closes: it takes the closing over from those who train, and gives it back."""

import asyncio

from gradientmail_core.events import RoundCommitted, SessionEnded
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.session.syncing import serve
from gradientmail_core.sim.checks import tape
from gradientmail_core.sim.loop import VirtualClock
from gradientmail_core.sim.world import ended
from tests.core.engine.parts import Place, virtually


async def serving(place: Place, stopping: asyncio.Event) -> int:
    return await serve(
        place.mailbox,
        node="s",
        stopping=stopping,
        timeouts=Timeouts(lease=12.0),
        clock=VirtualClock(place.loop),
        callbacks=[lambda event: place.log.append(("s", event))],
    )


async def closers_since(place: Place, seconds: float) -> set[str]:
    before = len(await tape(place.mailbox))
    await asyncio.sleep(seconds)
    return {record.node for record in (await tape(place.mailbox))[before:]}


def test_a_syncer_closes_for_all_and_they_close_again_when_it_left() -> None:
    async def main(place: Place) -> None:
        stopping = asyncio.Event()
        syncer = asyncio.ensure_future(serving(place, stopping))
        await asyncio.sleep(5)
        nodes = [place.launch(name, steps=1200, min_nodes=2) for name in "ab"]
        await asyncio.sleep(20)
        assert await closers_since(place, 20) == {"s"}
        stopping.set()
        assert await syncer > 0
        await asyncio.sleep(10)
        assert await closers_since(place, 20) <= {"a", "b"}
        await ended(nodes)
        assert [event for who, event in place.log if who == "s" and isinstance(event, SessionEnded)]
        records = await tape(place.mailbox)
        assert all(later.next_step > later.step for later in records)

    virtually(main)


def test_learners_that_never_close_depend_on_a_syncer() -> None:
    async def main(place: Place) -> None:
        nodes = [place.launch(name, steps=400, role="learner", min_nodes=2) for name in "ab"]
        await asyncio.sleep(10)
        assert not await tape(place.mailbox), "nobody closes"
        stopping = asyncio.Event()
        syncer = asyncio.ensure_future(serving(place, stopping))
        await ended(nodes)
        stopping.set()
        await syncer
        records = await tape(place.mailbox)
        assert {record.node for record in records} == {"s"} and len(records) > 10
        assert all(event.participants for event in place.events(RoundCommitted))

    virtually(main)


def test_stopped_before_there_is_a_run_it_leaves_no_trace_but_a_farewell() -> None:
    async def main(place: Place) -> None:
        stopping = asyncio.Event()
        syncer = asyncio.ensure_future(serving(place, stopping))
        await asyncio.sleep(5)
        stopping.set()
        assert await syncer == 0

    virtually(main)


def test_told_to_stop_while_the_store_is_silent_it_ends() -> None:
    class Silent(MemoryMailbox):
        async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
            await asyncio.Event().wait()
            raise AssertionError

    async def main(place: Place) -> None:
        place.mailbox, stopping = Silent("run"), asyncio.Event()
        syncer = asyncio.ensure_future(serving(place, stopping))
        await asyncio.sleep(30)
        assert not syncer.done()
        stopping.set()
        async with asyncio.timeout(20):
            assert await syncer == 0
        assert "before it took part" in place.events(SessionEnded)[-1].reason

    virtually(main)
