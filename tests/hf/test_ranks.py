"""Nodes of two ranks under torchrun: DDP and FSDP2, one run, one model, and no row read twice."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from gradientmail_core.session import align
from tests.hf.node_program import full_values
from tests.hf.nodes import llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}


def start(tmp_path: Path, **options) -> subprocess.Popen[str]:
    """Start one node of two ranks; it shares a mailbox under ``tmp_path`` with the others."""
    settings = {"mailbox": (tmp_path / "run").as_uri(), "out": str(tmp_path), "steps": STEPS, **options}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "tests.hf.node_program", json.dumps(settings)]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finished(node: subprocess.Popen[str], seconds: float = 240.0) -> str:
    """What the node printed, once it ended; it is killed if it does not."""
    try:
        return node.communicate(timeout=seconds)[0]
    finally:
        node.kill()


def results(tmp_path: Path, node: str) -> list[dict]:
    """What each rank of a node wrote down."""
    return [json.loads((tmp_path / f"{node}-{rank}.json").read_text()) for rank in range(2)]


def test_ranks_hold_every_commit_and_read_disjoint_rows(tmp_path):
    """Two nodes of two ranks; 24 samples a step are 12 for each node and 6 for each rank, as long as both are there."""
    nodes = [
        start(tmp_path, nodes=2, node="a", kind="ddp", global_batch_size=24, evaluated=True),
        start(tmp_path, nodes=2, node="b", kind="fsdp2", global_batch_size=24, evaluated=True, streamed=True),
    ]
    printed = [finished(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    committed = llama(5)
    assert align(committed, mailbox=(tmp_path / "run").as_uri()) == STEPS
    expected = full_values(committed)
    assert expected != full_values(llama(42))
    for node in "ab":
        both = results(tmp_path, node)
        assert [rank["values"] == expected for rank in both] == [True, True], node
        sizes = [[len(batch) for batch in rank["read"]] for rank in both]
        assert sizes[0] == sizes[1] and len(sizes[0]) == STEPS
        assert sizes[0][:5] == [6] * 5
        together = [sorted(chain(*batches)) for batches in zip(*(rank["read"] for rank in both), strict=True)]
        assert sorted(chain(*together[:5])) == sorted(set(chain(*together[:5])))
    assert results(tmp_path, "a")[0]["read"][0] != results(tmp_path, "b")[0]["read"][0]


def leases(tmp_path: Path) -> list[str]:
    """The states in which the nodes' newest leases are: ``x`` after an abort."""
    return sorted(path.name.split("-")[1][0] for path in (tmp_path / "run").glob("live/leases/*/[!.]*"))


def test_a_rank_that_fails_ends_both_and_releases_the_lease(tmp_path):
    node = start(tmp_path, nodes=1, node="a", kind="ddp", fail_rank=1)
    printed = finished(node)
    assert node.returncode
    assert "ZeroDivisionError: this rank fails" in printed
    assert "done" not in printed
    assert leases(tmp_path)[-1] == "x", printed
