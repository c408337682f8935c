"""A dataset whose samples are dealt: the order all nodes agree on, and loaders that read what they are dealt."""

import copy
import zlib

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from gradientmail_core.adapters.torch_queue import SharedQueueDataset, dealt, is_shuffled, portion
from gradientmail_core.errors import ConfigurationError

ROWS = 10


def data(**options) -> SharedQueueDataset:
    return SharedQueueDataset(TensorDataset(torch.arange(ROWS)), **options)


def test_without_a_run_it_is_the_dataset_itself():
    shared = data()
    assert (len(shared), shared[3], shared.block) == (ROWS, (torch.tensor(3),), 8)
    assert [int(row) for batch in DataLoader(shared, batch_size=4) for row in batch[0]] == list(range(ROWS))
    assert SharedQueueDataset(range(1234)).block == 13


def test_all_nodes_agree_on_the_order_of_a_pass():
    """The numbers are those of a generator that never changes, so they may stand here."""
    assert zlib.crc32(b"data-0") == 760106637
    assert data().order(0, shuffled=True).tolist() == data().order(0, shuffled=True).tolist() == ORDER
    assert sorted(data().order(1, shuffled=True).tolist()) == data().order(1, shuffled=False).tolist()
    assert data().order(1, shuffled=True).tolist() != ORDER != data(name="text").order(0, shuffled=True).tolist()


ORDER = [4, 0, 1, 8, 6, 9, 7, 2, 3, 5]


def test_workers_are_not_sent_the_order():
    shared = data()
    shared.order(0, shuffled=True)
    sent = copy.copy(shared)
    assert (shared._orders.keys(), sent._orders) == ({0}, {})
    assert sent.order(0, shuffled=True).tolist() == ORDER


class Quick(TensorDataset):
    def __getitems__(self, indices):
        return [self[index] for index in indices] if len(indices) == 2 else None


def test_samples_are_read_several_at_a_time_where_the_dataset_can():
    quick = SharedQueueDataset(Quick(torch.arange(4)))
    assert [batch[0].tolist() for batch in DataLoader(quick, batch_size=2)] == [[0, 1], [2, 3]]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SharedQueueDataset(Endless()), "has no length or no numbered samples"),
        (lambda: SharedQueueDataset([]), "0 samples in blocks of None"),
        (lambda: data(block=0), "10 samples in blocks of 0"),
    ],
)
def test_what_cannot_be_dealt_is_refused(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        wrong()


@pytest.mark.parametrize("shuffle", [False, True])
def test_whether_to_shuffle_is_the_loaders_word(shuffle):
    assert is_shuffled(DataLoader(data(), batch_size=2, shuffle=shuffle)) is shuffle
    ranks = DistributedSampler(data(), num_replicas=2, rank=0, shuffle=shuffle)
    assert is_shuffled(DataLoader(data(), batch_size=2, sampler=ranks)) is shuffle


@pytest.mark.parametrize("options", [{"sampler": WeightedRandomSampler([1.0] * ROWS, 4)}, {"batch_size": None}])
def test_a_sampler_of_ones_own_is_refused(options):
    with pytest.raises(ConfigurationError, match="the queue decides who reads what"):
        is_shuffled(DataLoader(data(), **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_what_it_is_dealt(workers):
    hand = [5, 4, 9, 0, 1, 7]
    asked = []

    def draw(count):
        asked.append(count)
        taken, hand[:] = hand[:count], hand[count:]
        return taken

    own = DataLoader(data(), batch_size=4, num_workers=workers)
    loader = dealt(own, draw, lambda: True, None)
    assert [batch[0].tolist() for batch in loader] == [[5, 4, 9, 0], [1, 7]]
    assert set(asked) == {4}
    with pytest.raises(TypeError, match="not known"):
        len(loader)
    assert len(own) == 3


@pytest.mark.parametrize(("joined", "sizes"), [(False, [4, 4, 2]), (True, [3, 3])])
def test_sizes_follow_the_share_and_without_a_run_it_reads_by_itself(joined, sizes):
    hand = list(range(6))

    def draw(count):
        return [hand.pop() for _ in range(min(count, len(hand)))]

    loader = dealt(DataLoader(data(), batch_size=4), draw, lambda: joined, lambda: 3)
    assert [len(batch[0]) for batch in loader] == sizes


def test_a_run_that_is_joined_later_is_drawn_from_then():
    """As after a search for a batch size, which has the loader begun before training is certain."""
    answers, hand = iter([False, True]), [[], [9]]
    loader = dealt(DataLoader(data(), batch_size=4), lambda count: hand.pop(), lambda: next(answers), None)
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [9]]


def test_portions_are_even_and_never_empty():
    assert [portion(range(7), part, 3) for part in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [portion([8, 9], part, 3) for part in range(3)] == [[8], [8], [9]]
    assert portion([], 1, 3) == []
