"""Mixes: partners, rows, contraction, means, divergence."""

import numpy as np
import pytest

from gradientmail_core.algorithms.mixing import (
    All,
    Nothing,
    Pair,
    Peers,
    contraction,
    divergence,
    matrix,
    mean_of,
    mix_from,
    mix_settings,
    partners,
    permuted,
    row,
    spread_about,
)
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.kernels import BLOCK

MIXES = (All(), Nothing(), Pair(), Peers(1), Peers(3))


def names(count):
    return tuple(f"node-{number:02}" for number in range(count))


def decoder(values):
    return lambda start, stop, out: np.copyto(out, values[start:stop])


@pytest.mark.parametrize("mix", MIXES)
def test_settings_come_back_from_plain_json(mix):
    assert mix_from(mix_settings(mix)) == mix


@pytest.mark.parametrize("settings", [{"name": "Ring"}, {"name": "Peers", "k": 0}, {"name": "Peers", "k": "2"}, {}])
def test_unknown_mixes_are_refused(settings):
    with pytest.raises(ConfigurationError):
        mix_from(settings)


def test_a_permutation_depends_on_seed_stage_and_nodes_only():
    nodes = names(9)
    assert permuted("5a", 0, nodes) == permuted("5a", 0, nodes[::-1])
    assert sorted(permuted("5a", 0, nodes)) == sorted(nodes)
    assert len({permuted(seed, stage, nodes) for seed in ("5a", "5b") for stage in (0, 1)}) == 4


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("mix", MIXES)
def test_rows_sum_to_one_and_columns_too_where_everyone_has_a_partner(mix, count):
    weights = matrix(mix, names(count), "seed")
    assert np.allclose(weights.sum(1), 1.0)
    assert np.allclose(weights.sum(0), 1.0)
    assert (np.diag(weights) > 0).all()


def test_pairs_are_mutual_and_one_of_an_odd_number_stays_alone():
    nodes = names(7)
    chosen = {node: partners(Pair(), node, nodes, "seed") for node in nodes}
    assert sorted(len(others) for others in chosen.values()) == [0, 1, 1, 1, 1, 1, 1]
    assert all(chosen[others[0]] == (node,) for node, others in chosen.items() if others)


def test_peers_are_k_others_or_all_there_are():
    assert len(partners(Peers(3), "node-00", names(8), "seed")) == 3
    assert partners(Peers(9), "node-01", names(3), "seed") == ("node-00", "node-02")
    assert partners(Peers(2), "stranger", names(3), "seed") == ()


def test_a_row_is_renormalised_over_those_who_answered():
    assert row("b", ["a", "c"]) == {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
    assert row("b", []) == {"b": 1.0}


@pytest.mark.parametrize("count", [4, 7, 8, 16])
@pytest.mark.parametrize("mix", [Pair(), Peers(1), Peers(2), Peers(3)])
def test_measured_contraction_is_the_documented_one(mix, count):
    dice, nodes, ratios = np.random.default_rng(count), names(count), []
    for draw in range(800):
        apart = dice.standard_normal(count)
        apart -= apart.mean()
        mixed = matrix(mix, nodes, f"{draw:x}") @ apart
        ratios.append(float(mixed @ mixed) / float(apart @ apart))
    assert np.mean(ratios) == pytest.approx(contraction(mix, count), abs=4 * np.std(ratios) / np.sqrt(800) + 1e-12)


def test_rounds_in_a_row_contract_by_powers():
    assert contraction(Pair(), 8, 3) == pytest.approx(contraction(Pair(), 8) ** 3)
    assert (contraction(All(), 8), contraction(Nothing(), 8), contraction(Pair(), 1)) == (0.0, 1.0, 1.0)


def test_a_mean_is_summed_in_fp64():
    vectors = [np.full(BLOCK + 3, value, np.float32) for value in (1e8, 1.0, -1e8)]
    out = np.empty(BLOCK + 3, np.float32)
    mean_of([decoder(values) for values in vectors], out)
    assert (out == np.float32(1 / 3)).all()


def test_the_spread_counts_the_first_elements_only():
    vectors = [np.array([1, 3, 100], np.float32), np.array([3, 5, -100], np.float32)]
    mean = np.array([2, 4, 0], np.float32)
    assert spread_about([decoder(values) for values in vectors], mean, 2) == pytest.approx(2.0)
    assert spread_about([], mean, 2) == 0.0


def test_outputs_that_agree_have_no_divergence_and_disjoint_ones_the_most():
    same = np.array([[0.2, 0.8], [0.5, 0.5]], np.float32)
    assert divergence([same, same, same]) == pytest.approx(0.0, abs=1e-7)
    one, other = np.array([[1.0, 0.0]], np.float32), np.array([[0.0, 1.0]], np.float32)
    assert divergence([one, other]) == pytest.approx(np.sqrt(np.log(2)))
