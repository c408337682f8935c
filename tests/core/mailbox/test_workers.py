"""Threads that do what they are given, and that nobody has to wait for."""

import subprocess
import sys
import threading

import pytest

from gradientmail_core.mailbox.workers import Workers

BLOCKED = """
import threading
from gradientmail_core.mailbox.workers import Workers
workers = Workers(1, "blocked")
workers.submit(threading.Event().wait)
workers.closed()
"""


def test_they_work_side_by_side_and_hand_back_what_came_of_it() -> None:
    workers, together = Workers(2, "test"), threading.Barrier(2, timeout=30)
    for future in [workers.submit(together.wait) for _ in range(4)]:
        assert future.result(30) in (0, 1)
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 // 0).result(30)
    assert workers.submit(lambda word: word, "x").result(30) == "x"
    workers.shutdown()


def test_closed_they_end_what_they_were_given_and_take_no_more() -> None:
    workers, gate = Workers(1, "test"), threading.Event()
    first, second = workers.submit(gate.wait, 30), workers.submit(lambda: "second")
    ended = workers.closed()
    assert not ended.done() and not ended.cancel()
    with pytest.raises(RuntimeError, match="closed"):
        workers.submit(gate.wait)
    gate.set()
    ended.result(30)
    assert first.done() and second.result() == "second"
    assert workers.closed() is ended


def test_unused_they_have_nothing_to_end() -> None:
    assert Workers(3, "test").closed().done()


def test_a_process_ends_although_one_is_blocked() -> None:
    subprocess.run([sys.executable, "-c", BLOCKED], check=True, timeout=60)
