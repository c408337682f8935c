"""The engine's thread: results and errors come back, a wait can be broken off, and it ends."""

import asyncio
import signal
import threading

import pytest

from gradientmail_core.session.background import Loop


def test_results_and_errors_come_back_from_another_thread() -> None:
    async def where() -> str:
        return threading.current_thread().name

    async def broken() -> None:
        raise ZeroDivisionError("inside")

    loop = Loop()
    assert loop.run(where()) == "gradientmail" != threading.current_thread().name
    with pytest.raises(ZeroDivisionError, match="inside"):
        loop.run(broken())
    loop.stop()
    loop.stop()


def test_a_wait_that_is_broken_off_cancels_the_work() -> None:
    begun, cancelled = threading.Event(), threading.Event()
    loop = Loop()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupt() -> None:
        begun.wait(30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(endless())
    interrupter.join()
    assert cancelled.wait(30)
    loop.stop()
