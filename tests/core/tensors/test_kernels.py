import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.tensors import kernels
from gradientmail_core.tensors.kernels import BLOCK

SIZES = [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 13]


def random(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_blocks_cover_every_element_once_at_fixed_borders(size):
    seen, lock = [], threading.Lock()

    def work(start, stop):
        with lock:
            seen.append((start, stop))

    kernels.for_blocks(size, work)
    seen.sort()
    assert [start for start, _ in seen] == list(range(0, size, BLOCK))
    assert all(stop == min(start + BLOCK, size) for start, stop in seen)


@pytest.mark.parametrize("size", SIZES)
def test_elementwise_operations_equal_numpys(size):
    a, b, out = random(size), random(size, 1), np.empty(size, np.float32)
    kernels.subtract(a, b, out)
    assert np.array_equal(out, a - b)
    kernels.add(a, b, out)
    assert np.array_equal(out, a + b)
    kernels.copy(a, out)
    assert np.array_equal(out, a)
    kernels.subtract(a, b, a)
    assert np.array_equal(a, out - b)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, BLOCK, 4 * BLOCK + 2])
def test_one_bad_value_is_found_wherever_it_is(bad, place):
    values = random(4 * BLOCK + 3)
    assert kernels.is_finite(values)
    values[place] = bad
    assert not kernels.is_finite(values)


def test_sums_are_exact_per_product_and_do_not_overflow():
    values = np.full(3, 3e38, np.float32)
    assert kernels.sum_of_squares(values) == 3 * float(values[0]) ** 2
    assert kernels.dot_in_blocks(values, -values) == -3 * float(values[0]) ** 2
    assert kernels.sum_of_squares(np.empty(0, np.float32)) == 0.0


@settings(max_examples=20, deadline=None)
@given(size=st.integers(0, 3 * BLOCK), seed=st.integers(0, 9))
def test_sums_agree_with_fp64(size, seed):
    a, b = random(size, seed), random(size, seed + 10)
    assert kernels.sum_of_squares(a) == pytest.approx(float(np.sum(a.astype(np.float64) ** 2)), rel=1e-12)
    assert kernels.dot_in_blocks(a, b) == pytest.approx(float(np.sum(a.astype(np.float64) * b)), rel=1e-9, abs=1e-9)


def test_thread_count_and_cpu_features_do_not_change_a_bit_of_a_sum():
    code = (
        "import numpy as np; from gradientmail_core.tensors import kernels as k;"
        "a = np.random.default_rng(3).standard_normal(7 * k.BLOCK + 5, dtype=np.float32);"
        "print(k.thread_count(), k.sum_of_squares(a).hex(), k.dot_in_blocks(a, a[::-1].copy()).hex())"
    )
    features = "AVX512_SPR AVX512_ICL X86_V4 X86_V3 AVX512F AVX2 FMA3"

    def child(threads, disabled):
        environment = os.environ | {"GRADIENTMAIL_THREADS": threads, "NPY_DISABLE_CPU_FEATURES": disabled}
        command = [sys.executable, "-W", "ignore", "-c", code]
        count, *sums = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout.split()
        assert count == threads
        return sums

    assert child("1", "") == child("5", features)


def test_blocks_are_added_in_their_order():
    values = random(9 * BLOCK).reshape(9, BLOCK) * np.float32([1, 3e4, 1e-4, 2e3, 7, 1e-2, 5e4, 1e-3, 9])[:, None]
    expected = 0.0
    for block in values.astype(np.float64):
        expected += float(np.add.reduce(block * block))
    assert kernels.sum_of_squares(values.reshape(-1)) == expected


def test_a_failure_on_any_thread_reaches_the_caller_and_the_pool_lives_on(monkeypatch):
    monkeypatch.setenv("GRADIENTMAIL_THREADS", "2")
    for fails_in_caller in (True, False):
        both_at_work, caller = threading.Barrier(2, timeout=30), threading.get_ident()

        def work(index, barrier=both_at_work, caller=caller, fails_in_caller=fails_in_caller):
            if index < 2:
                barrier.wait()
                if (threading.get_ident() == caller) == fails_in_caller:
                    raise ValueError(f"item {index}")

        with pytest.raises(ValueError, match="item"):
            kernels.for_each(8, work)
    test_elementwise_operations_equal_numpys(5 * BLOCK)


def test_a_call_inside_an_item_stays_on_its_thread_even_if_others_are_idle(monkeypatch):
    monkeypatch.setenv("GRADIENTMAIL_THREADS", "2")
    both_at_work, caller, seen = threading.Barrier(2, timeout=30), threading.get_ident(), set()

    def work(index):
        both_at_work.wait()
        if threading.get_ident() == caller:
            kernels.for_each(4, lambda _: (seen.add(threading.get_ident()), time.sleep(0.02)))

    kernels.for_each(2, work)
    assert seen == {caller}


def test_many_callers_at_once_all_get_their_result():
    values = random(9 * BLOCK)
    expected, got = kernels.sum_of_squares(values), []
    callers = [threading.Thread(target=lambda: got.append(kernels.sum_of_squares(values))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert got == [expected] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_makes_threads_of_its_own():
    code = (
        "import os, numpy as np; from gradientmail_core.tensors import kernels as k;"
        "a = np.ones(9 * k.BLOCK, np.float32); k.sum_of_squares(a); pid = os.fork();"
        "os._exit(0 if k.sum_of_squares(a) == a.size else 1) if pid == 0 else None;"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    environment = os.environ | {"GRADIENTMAIL_THREADS": "3"}
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, timeout=60).returncode == 0
