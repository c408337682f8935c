"""Batches are counted from their shapes and follow a share; nodes shuffle differently; nobody's loader is changed."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from gradientmail_core.adapters.torch_loaders import (
    ElasticStream,
    elastic,
    in_own_order,
    samples_in,
    why_rigid,
    with_sampler,
)
from gradientmail_core.errors import ConfigurationError


@dataclass
class Example:
    features: torch.Tensor
    label: int


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(5, 3), 5),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ((torch.tensor(3.0), torch.zeros(6, 1)), 6),
        ({"input_ids": torch.zeros(3, 7), "labels": torch.zeros(3)}, 21),
        ({"x": {"y": torch.zeros(2, 9)}}, 2),
        ({"names": ["a", "b", "c"], "x": torch.zeros(3, 1)}, 3),
        (Example(torch.zeros(8, 2), 1), 8),
        (["a", "b", "c"], 3),
        (torch.tensor(1.0), 1),
        ("text", 1),
        ({}, 1),
        (None, 1),
        (7, 1),
    ],
    ids=str,
)
def test_samples_in_a_batch(batch, expected):
    assert samples_in(batch) == expected


def test_an_encoding_with_attributes_counts_tokens():
    class Encoding:
        input_ids = torch.zeros(2, 6)

    assert samples_in(Encoding()) == 12


def order(loader, node, seed=7):
    torch.manual_seed(seed)
    return [int(index) for batch in in_own_order(loader, node) for index in batch]


SHUFFLED = {
    "shuffle": lambda data: DataLoader(data, batch_size=4, shuffle=True),
    "batch_sampler": lambda data: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False)),
    "weighted": lambda data: DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 64, 64, False)),
    "workers": lambda data: DataLoader(data, batch_size=4, shuffle=True, num_workers=1),
    "single": lambda data: DataLoader(data, batch_size=None, sampler=RandomSampler(data), collate_fn=lambda row: [row]),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_nodes_with_one_seed_read_in_different_orders(kind):
    loader = SHUFFLED[kind](torch.arange(64))
    orders = {node: order(loader, node) for node in "ab"}
    assert orders["a"] != orders["b"]
    assert sorted(orders["a"]) == sorted(orders["b"]) == list(range(64))
    assert order(loader, "a") == orders["a"]
    assert order(loader, "a", seed=8) != orders["a"]


def test_the_next_epoch_is_in_another_order():
    torch.manual_seed(7)
    loader = in_own_order(DataLoader(torch.arange(64), batch_size=4, shuffle=True), "a")
    first, second = ([int(index) for batch in loader for index in batch] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_the_users_loader_is_untouched():
    loader = DataLoader(torch.arange(64), batch_size=4, shuffle=True, persistent_workers=True, num_workers=1)
    before = dict(vars(loader)), dict(vars(loader.sampler)), dict(vars(loader.batch_sampler))
    copied = in_own_order(loader, "a")
    assert (dict(vars(loader)), dict(vars(loader.sampler)), dict(vars(loader.batch_sampler))) == before
    assert copied is not loader
    assert type(copied) is type(loader)
    assert len(copied) == len(loader) == 16


DATA: Any = torch.arange(8)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_size=2),
        DataLoader(DATA, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1)),
        DataLoader(DATA, sampler=RandomSampler(range(8), generator=torch.Generator())),
        DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]),
        DataLoader(Endless(), batch_size=2),
        [DATA],
    ],
    ids=["sequential", "own_generator", "own_sampler_generator", "list_of_batches", "iterable", "no_loader"],
)
def test_an_order_that_somebody_chose_is_left_alone(loader):
    assert in_own_order(loader, "a") is loader


def test_a_sampler_can_be_put_in_the_place_of_another():
    loader = DataLoader(torch.arange(8), batch_size=3, shuffle=True, drop_last=True)
    replaced = with_sampler(loader, SequentialSampler(range(8)))
    assert [batch.tolist() for batch in replaced] == [[0, 1, 2], [3, 4, 5]]


# Sizes that change


def indices(loader):
    return [[int(index) for index in batch] for batch in loader]


def handed_out(stream, batches):
    iterator = iter(stream)
    return [next(iterator) for _ in range(batches)]


def shuffled(seed=1, size=12):
    return RandomSampler(range(size), generator=torch.Generator().manual_seed(seed))


def test_batches_follow_the_share_and_passes_follow_each_other():
    sizes = iter([4, 1, 0, 5, 3, 8])
    stream = ElasticStream(SequentialSampler(range(10)), lambda: next(sizes), batches=6)
    batches = list(stream)
    assert [len(batch) for batch in batches] == [4, 1, 1, 5, 3, 8]
    assert [index for batch in batches for index in batch] == [*range(10), *range(10), 0, 1]


def test_the_length_is_what_was_said_and_no_sampler_is_endless():
    stream = ElasticStream(SequentialSampler(range(10)), lambda: 4, batches=3)
    assert len(stream) == len(list(stream)) == 3
    with pytest.raises(TypeError, match="no length"):
        len(ElasticStream(SequentialSampler(range(10)), lambda: 4))


def test_what_was_not_trained_on_comes_again_first_and_in_order():
    size = 4
    stream = ElasticStream(SequentialSampler(range(100)), lambda: size)
    assert handed_out(stream, 5)[-1] == [16, 17, 18, 19]
    stream.confirm(2)
    size = 3
    assert handed_out(stream, 5) == [[8, 9, 10], [11, 12, 13], [14, 15, 16], [17, 18, 19], [20, 21, 22]]
    stream.confirm(99)
    assert handed_out(stream, 1) == [[23, 24, 25]]


def test_an_iterator_that_was_replaced_yields_nothing_more():
    stream = ElasticStream(SequentialSampler(range(100)), lambda: 4)
    old = iter(stream)
    assert next(old) == [0, 1, 2, 3]
    new = iter(stream)
    assert list(old) == []
    assert next(new) == [0, 1, 2, 3]


def test_processes_divide_each_block():
    shares = [3, 1, 4, 2]
    ranks = []
    for rank in range(2):
        sizes = iter(shares)
        stream = ElasticStream(shuffled(), lambda sizes=sizes: next(sizes), batches=4, rank=rank, world=2)
        ranks.append(list(stream))
    assert [len(batch) for batch in ranks[0]] == [len(batch) for batch in ranks[1]] == shares
    together = [index for first, second in zip(*ranks, strict=True) for index in first + second]
    assert together == list(itertools.islice(itertools.chain(*two_passes()), 20))


def two_passes():
    sampler = shuffled()
    return list(sampler), list(sampler)


def test_the_sampler_hears_of_each_pass():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0, seed=3)
    stream = ElasticStream(sampler, lambda: 4, batches=2)
    first, second = stream
    sampler.set_epoch(1)
    assert second == list(sampler)
    assert first != second


@pytest.mark.parametrize("kind", ["generator", "epochs", "sequential"])
@pytest.mark.parametrize("trained", [0, 1, 4, 5])
def test_a_saved_position_is_found_again(kind, trained):
    def make():
        samplers = {
            "generator": shuffled(),
            "epochs": DistributedSampler(range(12), num_replicas=1, rank=0),
            "sequential": SequentialSampler(range(12)),
        }
        return ElasticStream(samplers[kind], lambda: 3)

    stream = make()
    iterator = iter(stream)
    for _ in range(trained):
        next(iterator)
        stream.confirm()
    next(iterator)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = handed_out(stream, 9)
    other = make()
    handed_out(other, 3)
    other.load_state_dict(state)
    assert handed_out(other, 9) == expected
    assert other.state_dict() == state


@pytest.mark.parametrize("state", [{}, {"pass": -1, "position": 0}, {"pass": 0, "position": "3"}], ids=str)
def test_what_is_no_position_is_refused(state):
    with pytest.raises(ConfigurationError, match="no position in a stream"):
        ElasticStream(SequentialSampler(range(3)), lambda: 1).load_state_dict(state)


def test_a_sampler_without_indices_is_refused():
    with pytest.raises(ConfigurationError, match="yields nothing"):
        list(ElasticStream([], lambda: 1))


class Shares:
    """The share of one process, to be changed while a loader runs."""

    def __init__(self, size):
        self.size = size

    def __call__(self):
        return self.size


def trained(loader, stream, batches):
    """The first batches of an epoch; training ends there, with batches prefetched that nobody saw."""
    seen = []
    for batch in loader:
        seen.append([int(index) for index in batch])
        stream.confirm()
        if len(seen) == batches:
            break
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("later", [3, 7])
def test_every_item_comes_exactly_once_over_epochs_and_sizes(workers, drop_last, later):
    share = Shares(5)
    loader = DataLoader(torch.arange(64), batch_size=5, shuffle=True, num_workers=workers, drop_last=drop_last)
    resized, stream = elastic(in_own_order(loader, "a"), share)
    assert len(resized) == len(loader)
    seen = trained(resized, stream, 4)
    share.size = later
    while sum(map(len, seen)) < 64:
        seen += trained(resized, stream, 3)
    assert {len(batch) for batch in seen} == {5, later}
    assert sorted([index for batch in seen for index in batch][:64]) == list(range(64))


def test_a_whole_epoch_has_as_many_batches_as_before():
    share = Shares(5)
    loader = DataLoader(torch.arange(64), batch_size=5, drop_last=True)
    before = dict(vars(loader)), dict(vars(loader.batch_sampler))
    resized, stream = elastic(loader, share)
    for size in (5, 2, 9):
        share.size = size
        assert [len(batch) for batch in trained(resized, stream, 99)] == [size] * 12
    assert (dict(vars(loader)), dict(vars(loader.batch_sampler))) == before
    assert [len(batch) for batch in loader] == [5] * 12


class Sharded(IterableDataset):
    """The numbers below ``size``, each worker its part; ``sized`` variants say so."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(range(worker.id, self.size, worker.num_workers) if worker else range(self.size))


class Sized(Sharded):
    def __len__(self):
        return self.size


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_an_iterable_without_a_length_keeps_its_passes(workers, size):
    resized, stream = elastic(DataLoader(Sharded(32), batch_size=4, num_workers=workers), Shares(size))
    for _ in range(2):
        seen = trained(resized, stream, 99)
        assert max(len(batch) for batch in seen) == size
        assert sorted(index for batch in seen for index in batch) == list(range(32))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_an_iterable_with_a_length_keeps_its_number_of_batches(workers, size):
    loader = DataLoader(Sized(32), batch_size=4, num_workers=workers)
    share = Shares(4)
    resized, stream = elastic(loader, share)
    assert len(resized) == len(loader) == 8
    seen = trained(resized, stream, 3)
    share.size = size
    while sum(map(len, seen)) < 32 + 8 * 7:
        epoch = trained(resized, stream, 99)
        assert len(epoch) == 8
        seen += epoch
    flat = [index for batch in seen for index in batch]
    assert all(flat.count(number) >= 2 for number in range(32))
    if workers == 0:
        assert flat == [number % 32 for number in range(len(flat))]


def test_an_iterable_with_nothing_in_it_ends():
    resized, _ = elastic(DataLoader(Sized(0), batch_size=4), Shares(2))
    assert list(resized) == []


class Buckets(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(DATA, batch_size=None), "makes the batches itself"),
        (DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 2, False)), "Buckets decides"),
        (DataLoader(DATA, batch_sampler=[[0, 1]]), "list decides"),
        ([DATA], "a list, not a torch DataLoader"),
        (DataLoader(DATA, batch_size=3), None),
        (DataLoader(Endless(), batch_size=3), None),
    ],
    ids=["batched", "buckets", "list", "no_loader", "map", "iterable"],
)
def test_what_cannot_be_resized_says_why(loader, reason):
    found = why_rigid(loader)
    assert found is None if reason is None else reason in found
