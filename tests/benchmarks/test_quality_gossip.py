"""The gossip study: its table by hand, its order of trials, and that DiLoCo is the mix of everything."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.quality.gossip import DILOCO, SEEDS, SYNC_DP, GossipTrial, run, table, trials, variants
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.algorithms.mixing import All, Nothing, Peers
from gradientmail_core.algorithms.outer import SGD, Nesterov


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


def test_diloco_mixes_everything_as_it_ships_and_the_mixes_of_gradients_are_what_their_names_say() -> None:
    played = variants()
    assert played.pop(SYNC_DP) is None
    settings = {name: found for name, found in played.items() if found is not None}
    everything, alone, preset = settings[DILOCO], settings["GlobalM1"], settings["GlobalM1LocalM2"]
    assert everything.mix1 == everything.mix2 == All() and everything.outer == DiLoCo().outer
    assert alone.outer == FactoredGossip().outer != everything.outer and alone.mix2 == Nothing()
    twice = settings["GlobalM1LocalM2, three peers twice on all"]
    assert preset.mix2 == twice.mix2 == Peers(3) and preset.mix2_on != () == twice.mix2_on
    assert (preset.rounds, twice.rounds) == (1, 2)
    for name, found in settings.items():
        assert name.endswith("warm-up 10") == (found.outer == Nesterov(warmup=10.0)), name
    for before, after in (("DiLoCo, warm-up 10", everything), ("GlobalM1LocalM2, warm-up 10", preset)):
        assert replace(settings[before], outer=after.outer) == after


def test_two_mixes_in_a_row_bring_gradients_closer_together_than_one() -> None:
    def apart(rounds: int) -> float:
        settings = FactoredGossip(sync_every=2, fragments=1, mix2=Peers(2), rounds=rounds, outer=SGD(1.0), follow=False)
        trial = GossipTrial(
            variant="", seed=0, algorithm=settings.shared_settings(), nodes=6, steps=2, width=32, layers=1, context=32,
            batch=2,
        )  # fmt: skip
        found: Mapping[str, Any] = run(trial)
        return float(found["l2"]["2"])

    assert 0 < apart(2) < 0.8 * apart(1)
