"""Two MLX processes as one node: what rank 0 does to the model, both hold; what stops rank 0, stops both."""

# ruff: noqa: E402  # what follows the skip needs mlx

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")

import mlx.nn as nn

from gradientmail_core.adapters.mlx import MlxModel
from gradientmail_core.adapters.mlx_distributed import MlxRanks
from tests.mlx.ring import on_two_ranks


def test_rank_0_is_mirrored(tmp_path):
    found = on_two_ranks(tmp_path, kind="mirror")
    for rank in found:
        assert rank["total"] == 7
        assert rank["result"] == 7
        assert rank["idle"] == 2**40
        assert rank["step"] == 0
        assert rank["values"] == list(range(len(rank["values"])))
        assert rank["negative_zero"]
    assert found[0]["error"].startswith("ZeroDivisionError")
    assert found[1]["error"].startswith("SessionFailed: The node's leading process failed: integer")


def test_one_process_is_the_whole_node():
    ranks = MlxRanks(MlxModel(nn.Linear(2, 2)), mx.distributed.init())
    assert (ranks.size, ranks.leads, ranks.total(5), ranks.run(lambda: 3)) == (1, True, 5, 3)
    with pytest.raises(ZeroDivisionError):
        ranks.run(lambda: 1 // 0)
