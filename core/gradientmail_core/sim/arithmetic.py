"""A draw of everything that decides what travels and how it is merged, for random runs."""

import random
from dataclasses import replace

from gradientmail_core.algorithms.alignment import Adaptive, Blend, Carry, Eager, Overwrite
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.merge import Median, Rda, TrimmedMean, WeightedMean
from gradientmail_core.algorithms.outer import SGD, Adam, HeavyBall, Nesterov

CODECS = ("F32", "BF16", "F8_E4M3", "F4", "INT8", "INT4", "INT2", "TOPK(64/4096,INT2)")


def with_arithmetic(settings: DiLoCo, dice: random.Random) -> DiLoCo:
    """``settings`` with codecs, formats, merge, optimizer and alignment drawn anew; plain in a third of the draws."""
    if dice.random() < 1 / 3:
        return settings
    commit_codec = dice.choice((None, "F32", "BF16", "INT8", "INT4"))
    return replace(
        settings,
        delta_codec=dice.choice(CODECS),
        error_feedback=dice.choice((None, 0.95, 1.0)),
        commit_codec=commit_codec,
        full_every=1 if commit_codec is None else dice.choice((1, 2, 5)),
        master_dtype=dice.choice(("F32", "F32", "BF16")),
        momentum_dtype=dice.choice(("F32", "BF16", "F16")),
        residual_dtype=dice.choice(("F32", "BF16")),
        alignment=dice.choice((Overwrite(), Blend(0.5), Carry(), Adaptive(), Eager())),
        compression=dice.choice((None, "auto", "zstd")),
        merge_memory=dice.choice((0, 1000, 2**31)),
        stale=dice.choice(("reject", "rebase")),
        merge=dice.choice((Rda(), WeightedMean(), WeightedMean(clip=1.0), TrimmedMean(), Median())),
        outer=dice.choice((Nesterov(), SGD(), HeavyBall(), Adam())),
    )
