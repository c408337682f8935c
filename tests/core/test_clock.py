"""The machine's clock: monotonic seconds, waits that never block, and arithmetic kept off the event loop."""

import asyncio
import threading
import time

import pytest

from gradientmail_core.clock import SystemClock


def test_time_is_in_seconds_and_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.now() for _ in range(1000)]
    assert readings == sorted(readings)
    assert abs(clock.now() - time.monotonic()) < 5.0
    clock.close()


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_a_wait_of_no_time_lets_others_run(seconds: float) -> None:
    async def main() -> list[str]:
        clock, order = SystemClock(), []

        async def other() -> None:
            order.append("other")

        task = asyncio.ensure_future(other())
        await clock.sleep(seconds)
        order.append("this")
        await task
        clock.close()
        return order

    assert asyncio.run(main()) == ["other", "this"]


def test_a_wait_takes_at_least_its_time() -> None:
    async def main() -> float:
        clock = SystemClock()
        before = clock.now()
        await clock.sleep(0.05)
        clock.close()
        return clock.now() - before

    assert asyncio.run(main()) >= 0.049


def test_arithmetic_runs_beside_the_event_loop() -> None:
    async def main() -> tuple[str, bool]:
        clock, released = SystemClock(), threading.Event()

        def work() -> str:
            assert released.wait(30.0)
            return threading.current_thread().name

        computing = asyncio.ensure_future(clock.compute(work))
        await clock.sleep(0.0)
        waiting = not computing.done()
        released.set()
        name = await computing
        clock.close()
        return name, waiting

    name, waiting = asyncio.run(main())
    assert name.startswith("gradientmail-compute") and waiting


def test_one_computation_runs_at_a_time_in_the_order_asked() -> None:
    async def main() -> list[int]:
        clock, order = SystemClock(), []
        await asyncio.gather(*(clock.compute(lambda number=number: order.append(number)) for number in range(20)))  # type: ignore[misc]  # bound as it is made
        clock.close()
        return order

    assert asyncio.run(main()) == list(range(20))


def test_what_a_computation_raises_is_raised_where_it_is_awaited() -> None:
    async def main() -> None:
        clock = SystemClock()
        try:
            await clock.compute(lambda: 1 // 0)
        finally:
            clock.close()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def test_closing_lets_running_work_finish() -> None:
    async def main() -> str:
        clock, started, released = SystemClock(), threading.Event(), threading.Event()

        def work() -> str:
            started.set()
            assert released.wait(30.0)
            return "finished"

        computing = asyncio.ensure_future(clock.compute(work))
        await clock.sleep(0.0)
        assert started.wait(30.0)
        clock.close()
        released.set()
        return await computing

    assert asyncio.run(main()) == "finished"
