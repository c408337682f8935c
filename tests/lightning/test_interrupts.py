"""SIGTERM ends a wait, and only a wait."""

import os
import signal
import sys
import threading

import pytest

from gradientmail_lightning.interrupts import interruptible_waits

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM")


@pytest.fixture
def noted():
    """A handler that only takes note, as Lightning's does."""
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, before)


def soon(action):
    threading.Timer(0.1, action).start()


def test_a_wait_ends(noted):
    soon(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended, interruptible_waits():
        threading.Event().wait(60)
    assert ended.value.code == 143
    assert noted == [signal.SIGTERM]


def test_work_goes_on_to_its_end(noted):
    done = []
    with interruptible_waits():
        signal.raise_signal(signal.SIGTERM)
        done.append(1)
    assert done
    assert noted == [signal.SIGTERM]


def test_the_handler_before_is_back_afterwards(noted):
    before = signal.getsignal(signal.SIGTERM)
    with interruptible_waits():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ValueError, match="oh"), interruptible_waits():
        raise ValueError("oh")
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_is_left_alone(noted):
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with interruptible_waits():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
