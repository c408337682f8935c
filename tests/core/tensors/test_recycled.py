"""Memory serves again when its last reader is gone, and never before."""

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.recycled import BYTES_LEAST, Kept

SIZE = BYTES_LEAST // 4


def place(array: Flat) -> int:
    """Where its first byte lies."""
    return int(array.ctypes.data)


def test_memory_serves_again_once_its_array_is_gone() -> None:
    kept = Kept()
    first = kept.empty(SIZE)
    first[:] = 1.0
    where = place(first)
    del first
    again = kept.empty(SIZE)
    assert place(again) == where
    assert again.shape == (SIZE,)
    assert again.dtype == np.float32
    assert again.flags.writeable
    assert again.flags.c_contiguous


READERS: dict[str, Callable[[Flat], object]] = {
    "the array": lambda array: array,
    "a slice": lambda array: array[7:9],
    "a slice of a slice": lambda array: array[8:][:4].reshape(2, 2),
    "bytes": lambda array: array.view(np.uint8),
    "a memoryview": lambda array: array.data[3:4],
    "a reader of a closure": lambda array: array.sum,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_nothing_that_is_still_read_is_lent_again(reader: Callable[[Flat], object]) -> None:
    kept = Kept()
    array = kept.empty(SIZE)
    where = place(array)
    held = [reader(array)]
    del array
    gc.collect()
    others = [kept.empty(SIZE) for _ in range(3)]
    assert all(not where <= place(other) < where + BYTES_LEAST for other in others)
    held.clear()
    assert place(kept.empty(SIZE)) == where


def test_a_torch_tensor_over_an_array_holds_its_memory() -> None:
    torch = pytest.importorskip("torch")
    kept = Kept()
    tensor = torch.from_numpy(kept.empty(SIZE))[5:]
    tensor.fill_(3.0)
    kept.empty(SIZE).fill(1.0)
    assert bool((tensor == 3.0).all())


def test_no_more_than_asked_is_kept() -> None:
    kept = Kept(most=2)
    arrays = [kept.empty(SIZE) for _ in range(4)]
    places = {place(array) for array in arrays}
    assert len(places) == 4
    arrays.clear()
    assert len(kept._memories) == 2


def test_sizes_alike_share_memory_and_others_do_not() -> None:
    kept = Kept()
    array = kept.empty(8 * SIZE)
    where = place(array)
    del array
    small = kept.empty(SIZE)
    assert not where <= place(small) < where + 8 * BYTES_LEAST
    assert place(kept.empty(8 * SIZE - 100)) == where


def test_small_arrays_are_the_allocators() -> None:
    kept = Kept()
    array = kept.empty(10)
    del array
    assert not kept._memories


def test_threads_never_share_an_array() -> None:
    kept, failures = Kept(), []

    def work(number: int) -> None:
        for _ in range(200):
            array = kept.empty(SIZE)
            array[::4096] = number
            if not (array[::4096] == number).all():
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
