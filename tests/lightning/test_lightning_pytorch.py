"""Nodes of every kind, under both of Lightning's names, train one model from a directory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gradientmail_core.session import align
from tests.lightning.node_program import bare_model, full_values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
SECONDS_TO_END = 60.0
"""Ten at most on an idle machine; more would be a rank that waits for another one for ever."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}


def start(tmp_path: Path, **options) -> subprocess.Popen[str]:
    """Start one node; it shares a mailbox under ``tmp_path`` with the others."""
    settings = {"mailbox": (tmp_path / "run").as_uri(), "out": str(tmp_path), "steps": STEPS, **options}
    command = [sys.executable, "-m", "tests.lightning.node_program", json.dumps(settings)]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finished(node: subprocess.Popen[str], seconds: float = 240.0) -> str:
    """What the node printed, once it ended; it is killed if it does not."""
    try:
        return node.communicate(timeout=seconds)[0]
    finally:
        node.kill()


def values(path: Path) -> dict[str, list[float]]:
    return json.loads(path.read_text())


RANKS = ("a-0", "b-0", "b-1", "c-0", "c-1")
GLOBAL_BATCH = 24
EVALUATES_AFTER = 10


def test_nodes_of_every_kind_end_on_the_same_committed_bytes(tmp_path):
    """One process with a compiled model, two DDP ranks, and two FSDP2 ranks with half of the model each.

    They divide a batch of 24 between nodes and ranks until the first of them evaluates, on the committed model.
    """
    shared = {"nodes": 3, "global_batch_size": GLOBAL_BATCH, "evaluates": True}
    nodes = [
        start(tmp_path, **shared, node="a", kind="single", seed=1, compiled=True, namespace="pytorch_lightning"),
        start(tmp_path, **shared, node="b", kind="ddp", seed=2),
        start(tmp_path, **shared, node="c", kind="fsdp2", seed=3),
    ]
    printed = [finished(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0], "\n".join(printed)
    assert "GradientMail: b joined run" in printed[1]
    committed = bare_model()
    assert align(committed, mailbox=(tmp_path / "run").as_uri()) == STEPS
    expected = full_values(committed)
    ended = {rank: values(tmp_path / f"{rank}.json") for rank in RANKS}
    sizes = {rank: ended[rank].pop("sizes") for rank in RANKS}
    for rank in RANKS:
        assert ended[rank] == expected, rank
    torch.manual_seed(1)
    assert expected != full_values(bare_model())
    assert sizes["b-0"] == sizes["b-1"] and sizes["c-0"] == sizes["c-1"]
    before = slice(0, EVALUATES_AFTER)
    assert set(sizes["a-0"][before]) == {GLOBAL_BATCH // 3}
    assert set(sizes["b-0"][before]) == set(sizes["c-0"][before]) == {GLOBAL_BATCH // 3 // 2}
    evaluated = {rank: values(tmp_path / f"{rank}-evaluated.json") for rank in RANKS}
    assert all(seen == evaluated["a-0"] for seen in evaluated.values())
    assert evaluated["a-0"] != expected


def leases(tmp_path: Path) -> list[str]:
    """The states in which the nodes' newest leases are: ``x`` after an abort."""
    return sorted(path.name.split("-")[1][0] for path in (tmp_path / "run").glob("live/leases/*/[!.]*"))


@pytest.mark.parametrize(("kind", "rank", "shared"), [("ddp", 1, True), ("ddp", 0, False), ("fsdp2", 1, False)])
def test_a_rank_that_fails_ends_all_ranks_and_releases_the_lease(tmp_path, kind, rank, shared):
    """Also where the ranks are dealt their samples."""
    node = start(tmp_path, nodes=1, node="a", kind=kind, fail_rank=rank, shared=shared)
    assert any("ZeroDivisionError: this rank fails" in line for line in node.stdout)
    printed = finished(node, SECONDS_TO_END)
    assert node.returncode, printed
    assert leases(tmp_path)[-1] == "x"


def test_a_sigterm_ends_a_wait_for_other_nodes(tmp_path):
    node = start(tmp_path, nodes=2, node="a", kind="single")
    for line in node.stdout:
        if "waiting for 1 more node" in line:
            break
    time.sleep(0.2)
    node.send_signal(signal.SIGTERM)
    printed = finished(node, 60.0)
    assert node.returncode == 143, printed
    assert leases(tmp_path)[-1] == "x"
