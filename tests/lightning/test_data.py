"""Batches are counted from their shapes; each node shuffles differently, and nobody's loader is changed."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from gradientmail_lightning.data import in_own_order, node_seed, samples_in, with_sampler


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


def test_seeds_differ_between_nodes_and_not_between_starts():
    seeds = {node_seed(f"node-{number}", 42) for number in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert node_seed("a", 42) == node_seed("a", 42) != node_seed("a", 43)


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
