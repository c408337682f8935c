"""SIGTERM as an exception, where nobody else handles it."""

import signal
import threading

import pytest

from gradientmail_core.session import termination


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_raises_between_begin_and_end():
    termination.end_by_exception()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    termination.end_as_before()
    termination.end_as_before()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_somebody_elses_handler_stays():
    def theirs(number, frame):
        heard.append(number)

    heard = []
    signal.signal(signal.SIGTERM, theirs)
    termination.end_by_exception()
    signal.raise_signal(signal.SIGTERM)
    termination.end_as_before()
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is theirs


def test_a_handler_that_came_later_stays():
    termination.end_by_exception()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    termination.end_as_before()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_other_threads_do_nothing():
    failures = []

    def elsewhere():
        try:
            termination.end_by_exception()
            termination.end_as_before()
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not failures
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
