"""Virtual time: it jumps to the next timer, in an order that only the program decides, and a deadlock is an error."""

import asyncio
import time

import pytest

from gradientmail_core.sim.loop import Deadlock, VirtualClock, VirtualLoop, run_virtually

DAY = 24 * 3600.0


def test_a_hundred_days_pass_at_once() -> None:
    async def main(loop: VirtualLoop) -> float:
        await asyncio.sleep(100 * DAY)
        return loop.time()

    before = time.monotonic()
    assert run_virtually(main) == pytest.approx(100 * DAY)
    assert time.monotonic() - before < 60.0


def test_timers_fire_in_the_order_of_their_times_and_then_of_their_making() -> None:
    async def main(loop: VirtualLoop) -> list[tuple[float, str]]:
        fired: list[tuple[float, str]] = []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((loop.time(), name))

        await asyncio.gather(wait("late", 3.0), wait("first", 1.0), wait("second", 1.0), wait("now", 0.0))
        return fired

    expected = [(0.0, "now"), (1.0, "first"), (1.0, "second"), (3.0, "late")]
    assert run_virtually(main) == expected == run_virtually(main)


def test_work_takes_no_time() -> None:
    async def main(loop: VirtualLoop) -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return loop.time()

    assert run_virtually(main) == 0.0


def test_a_wait_with_a_time_out_ends_in_virtual_time() -> None:
    async def main(loop: VirtualLoop) -> float:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 10.0)
        return loop.time()

    assert run_virtually(main) == pytest.approx(10.0)


def test_waiting_for_what_nobody_will_do_is_a_deadlock() -> None:
    async def main(loop: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtually(main)


def test_tasks_left_over_are_cancelled() -> None:
    cancelled: list[bool] = []
    kept: list[object] = []

    async def main(loop: VirtualLoop) -> None:
        async def forever() -> None:
            try:
                await asyncio.sleep(1e9)
            finally:
                cancelled.append(True)

        kept.append(asyncio.ensure_future(forever()))
        await asyncio.sleep(0)

    run_virtually(main)
    assert cancelled == [True]


def test_what_the_program_raises_comes_out() -> None:
    async def main(loop: VirtualLoop) -> None:
        await asyncio.sleep(1.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_virtually(main)


def test_every_run_begins_at_0() -> None:
    loop = VirtualLoop()
    assert loop.time() == 0.0
    loop.close()


def test_a_nodes_clock_is_shifted_and_runs_at_its_own_rate() -> None:
    async def main(loop: VirtualLoop) -> None:
        fast = VirtualClock(loop, offset=500.0, rate=2.0)
        assert fast.now() == 500.0
        await fast.sleep(10.0)
        assert loop.time() == 5.0 and fast.now() == 510.0
        await fast.sleep(-1.0)
        assert loop.time() == 5.0
        assert await fast.compute(lambda: 6 * 7) == 42
        assert loop.time() == 5.0

    run_virtually(main)


def test_a_frozen_node_goes_on_when_thawed_while_time_passed() -> None:
    async def main(loop: VirtualLoop) -> None:
        frozen, other = VirtualClock(loop), VirtualClock(loop)
        sleeping = asyncio.ensure_future(frozen.sleep(1.0))
        frozen.freeze()
        await other.sleep(60.0)
        assert not sleeping.done() and frozen.now() == 60.0
        frozen.thaw()
        await sleeping
        assert loop.time() == 60.0

    run_virtually(main)


def test_a_frozen_nodes_sleep_can_be_cancelled() -> None:
    async def main(loop: VirtualLoop) -> None:
        clock = VirtualClock(loop)
        clock.freeze()
        sleeping = asyncio.ensure_future(clock.sleep(1.0))
        await asyncio.sleep(5.0)
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping

    run_virtually(main)
