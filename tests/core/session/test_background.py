"""The engine's thread: results and errors come back, a wait can be broken off, and it ends."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

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


FORGETFUL = """
import sys
import gradientmail_core as gm
from gradientmail_core.sim.world import ToyModel
session = gm.Session(ToyModel(), mailbox=sys.argv[1], algorithm=gm.DiLoCo(), node="a", callbacks=[])
session.join()
session.step()
"""


def test_a_program_that_forgets_to_close_releases_its_lease_as_it_ends(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", FORGETFUL, str(tmp_path / "run")], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    beats = sorted(path.name.split("-")[1][0] for path in (tmp_path / "run/live/leases/a").iterdir())
    assert "x" in beats
