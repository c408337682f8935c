"""The gossip study: its table by hand, its order of trials, and that DiLoCo is the mix of everything."""

from collections.abc import Mapping
from typing import Any

from benchmarks.quality.gossip import DILOCO, SEEDS, SYNC_DP, table, trials, variants
from gradientmail_core.algorithms.mixing import All, Pair, Peers


def row(variant: str, seed: int, loss: float, apart: float = 0.0) -> Mapping[str, Any]:
    return {
        "trial": {"variant": variant, "seed": seed}, "losses": {"50": 9.0, "100": loss},
        "node_losses": {"100": loss + 1}, "l2": {"100": apart}, "js": {"100": apart / 2},
    }  # fmt: skip


def test_final_losses_are_compared_seed_by_seed_and_the_best_comes_first() -> None:
    rows = [row("NoLoCo", seed, 2.2 + seed / 10, 0.4) for seed in range(2)]
    rows += [row(DILOCO, seed, 2.0 + seed / 10) for seed in range(2)]
    _, _, best, worst = table(rows).splitlines()
    assert best == "| DiLoCo | 2.0500 | +0.00 % ± 0.00 | 3.0500 | 0 | 0 | 2 |"
    assert worst == "| NoLoCo | 2.2500 | +9.76 % ± 0.00 | 3.2500 | 0.4 | 0.2 | 2 |"


def test_every_variant_is_played_with_every_seed_and_a_seed_is_whole_before_the_next() -> None:
    played = [(trial.seed, trial.variant) for trial in trials()]
    assert played == [(seed, variant) for seed in SEEDS for variant in variants()]
    assert len({str(trial.fields()) for trial in trials()}) == len(played)


def test_diloco_mixes_everything_and_the_mixes_of_gradients_are_what_their_names_say() -> None:
    everything, preset = variants()[DILOCO], variants()["GlobalM1LocalM2, three peers"]
    pairs, on_all = variants()["GlobalM1LocalM2"], variants()["GlobalM1LocalM2, three peers on all"]
    assert variants()[SYNC_DP] is None and everything is not None and everything.mix1 == everything.mix2 == All()
    assert preset is not None and pairs is not None and on_all is not None
    assert (pairs.mix2, preset.mix2, on_all.mix2) == (Pair(), Peers(3), Peers(3))
    assert pairs.mix2_on == preset.mix2_on != () == on_all.mix2_on
