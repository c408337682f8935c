"""The two studies as lists of trials, the most telling first.

``codecs``: four nodes, equal tokens, 1000 steps, a merge every 20: each codec without and with error feedback,
under Nesterov warmed up with 10, and SparseLoCo's setting (top 64 of 4096 with two-bit values, feedback 0.95,
plain mean, outer rate 1 and no momentum) beside the same outer step on uncompressed deltas.

``outer``: every 20 and every 100 steps; 2, 4 and 8 nodes; read at 300, 1000 and 3000 steps: constant
momentum, momentum warmed up with ``w`` of 3, 10 and 30, plain averaging, and one node alone, whose run is long
enough to be read at equal steps and at equal tokens. A node's batch is two windows, half the other study's.
"""

from collections.abc import Iterator, Mapping

from benchmarks.quality.trial import Trial
from gradientmail_core.algorithms.merge import Rda, WeightedMean
from gradientmail_core.algorithms.outer import SGD, Nesterov

SEEDS = (0, 1, 2)
INTERVALS = (20, 100)
NODES = (2, 4, 8)
READ_AT = (300, 1000, 3000)
OUTER_BATCH = 2
LOSSY = ("BF16", "F8_E4M3", "F4", "INT4", "INT2", "TOPK(64/4096,INT2)")
SPARSE = "TOPK(64/4096,INT2)"
ALONE = "alone"

MEAN, RDA = WeightedMean().settings(), Rda().settings()
AVERAGING = SGD(1.0).settings()
OUTERS: Mapping[str, Mapping[str, object]] = {
    "constant": Nesterov(warmup=0.0).settings(),
    "warm-up 3": Nesterov(warmup=3.0).settings(),
    "warm-up 10": Nesterov(warmup=10.0).settings(),
    "warm-up 30": Nesterov(warmup=30.0).settings(),
    "averaging": AVERAGING,
}


def codecs() -> Iterator[Trial]:
    """The quality ladder."""
    for seed in SEEDS:
        yield Trial(study="codecs", variant="F32", nodes=4, steps=1000, seed=seed)
        for codec in LOSSY:
            yield Trial(study="codecs", variant=codec, nodes=4, steps=1000, seed=seed, codec=codec)
            yield Trial(study="codecs", variant=codec, nodes=4, steps=1000, seed=seed, codec=codec, feedback=1.0)
        for codec, feedback in (("F32", None), (SPARSE, 0.95)):
            yield Trial(
                study="codecs", variant=f"{codec}, SparseLoCo's outer step", nodes=4, steps=1000, seed=seed,
                codec=codec, feedback=feedback, outer=AVERAGING, merge=MEAN,
            )  # fmt: skip


def outer() -> Iterator[Trial]:
    """The outer-optimizer study."""
    longest = max(READ_AT)
    for seed in SEEDS:
        steps = longest * max(NODES)
        yield Trial(study="outer", variant=ALONE, nodes=1, steps=steps, seed=seed, outer=None, batch=OUTER_BATCH)
    for seed in SEEDS:
        for nodes in NODES:
            for interval in INTERVALS:
                for variant, settings in OUTERS.items():
                    merge = MEAN if variant == "averaging" else RDA
                    yield Trial(
                        study="outer", variant=variant, nodes=nodes, steps=longest, seed=seed, sync_every=interval,
                        outer=settings, merge=merge, batch=OUTER_BATCH,
                    )  # fmt: skip


PLANS = {"codecs": codecs, "outer": outer}
