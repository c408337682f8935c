"""The outer study's table, against rows whose outcome can be worked out by hand."""

from collections.abc import Mapping
from typing import Any

from benchmarks.quality.log import path_of, read
from benchmarks.quality.plans import ALONE, NODES, OUTERS, RDA, READ_AT
from benchmarks.quality.tables import cells, outer_table
from gradientmail_core.algorithms.diloco import DiLoCo

Rows = list[Mapping[str, Any]]


def row(variant: str, seed: int, loss: float, nodes: int = 2, interval: int = 20) -> Mapping[str, Any]:
    steps = {str(step * factor) for step in READ_AT for factor in (1, *NODES)}
    trial = {"variant": variant, "seed": seed, "nodes": nodes, "sync_every": interval}
    return {"trial": trial, "losses": dict.fromkeys(steps, loss)}


def three_seeds(variant: str, *losses: float) -> Rows:
    return [row(variant, seed, loss) for seed, loss in enumerate(losses)]


ALONE_ROWS = [row(ALONE, seed, 2.0 + seed / 10, nodes=1) for seed in range(3)]


def test_a_variant_loses_where_its_mean_is_above_one_node_alone_of_the_same_seeds() -> None:
    rows = ALONE_ROWS + three_seeds("constant", 2.3, 2.4, 2.1) + three_seeds("averaging", 1.9, 2.2, 2.1)
    first, *_ = cells(rows)
    assert first.loses("constant") and not first.loses("averaging")


def test_noise_is_that_of_the_difference_to_the_best_of_the_same_seed() -> None:
    best, beside, steadily = (1.5, 1.7, 1.9), (1.51, 1.69, 1.92), (1.52, 1.72, 1.92)
    rows = ALONE_ROWS + three_seeds("averaging", *best)
    rows += three_seeds("constant", *beside) + three_seeds("warm-up 10", *steadily)
    first, *_ = cells(rows)
    assert first.best() == "averaging" and first.within_noise("averaging")
    assert first.within_noise("constant"), "0.007 above, give or take 0.009"
    assert not first.within_noise("warm-up 10"), "0.02 above on every seed, though seeds are 0.2 apart"


def test_seeds_that_not_every_variant_has_are_left_out() -> None:
    rows = ALONE_ROWS + three_seeds("averaging", 1.9, 0.1) + three_seeds("constant", 1.8)
    first, *_ = cells(rows)
    assert first.best() == "constant" and set(first.alone) == {0}


def test_a_situation_without_rows_has_no_line_and_one_seed_has_no_spread() -> None:
    text = outer_table(ALONE_ROWS + three_seeds("averaging", 1.9) + three_seeds("constant", 2.09))
    lines = text.splitlines()
    assert len([line for line in lines if line.startswith("| 20 |")]) == len(READ_AT)
    assert "| 20 | 2 | 300 | 1 | 2.000 | 2.000 | 2.090 | **1.900** |" in lines and "±" not in text
    assert lines[-4:] == [
        "| best or within noise | 0 | 3 |",
        "| above one node alone | 3 | 0 |",
        "| above the best, mean | 10.0% | 0.0% |",
        "| above the best, at most | 10.0% | 0.0% |",
    ]


def test_the_default_never_loses_to_one_node_alone_and_is_most_often_best_or_within_noise() -> None:
    """The docstring of ``Nesterov`` says so, of the committed rows."""
    shipped = DiLoCo().shared_settings()
    (default,) = [name for name, settings in OUTERS.items() if settings == shipped["outer"]]
    assert shipped["merge"] == RDA
    found = list(cells(read(path_of("outer"))))
    assert not any(cell.loses(default) for cell in found)
    held = {name: sum(cell.within_noise(name) for cell in found) for name in OUTERS}
    assert max(held, key=held.__getitem__) == default, held
