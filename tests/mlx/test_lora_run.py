"""Two processes of the command line fine-tune adapters in one run: each file holds commits and loads with mlx-lm."""

# ruff: noqa: E402  # what follows the skip needs mlx

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from mlx.utils import tree_flatten
from mlx_lm.utils import load

from gradientmail_core.adapters.mlx import MlxModel
from gradientmail_core.clock import SystemClock
from gradientmail_core.engine.loading import Source, parameters
from gradientmail_core.mailbox import DirectoryMailbox
from gradientmail_core.protocol.plan import manifest_layouts
from gradientmail_core.sim.checks import manifest_of, tape
from tests.mlx.bases import command

ROOT = Path(__file__).parents[2]
SETTINGS = ["--sync-every", "4", "--fragments", "2", "--overlap-steps", "0", "--quorum-size", "2", "--min-nodes", "2"]


async def ages(model: MlxModel, mailbox: DirectoryMailbox) -> list[int]:
    """For each fragment, how many versions ago the model's values were committed; 2 if not in the two newest."""
    manifest, _ = await manifest_of(mailbox)
    layouts = manifest_layouts(manifest)
    assert isinstance(layouts, tuple)
    records = await tape(mailbox)
    found = []
    for layout in layouts:
        held = np.empty(layout.size, np.float32)
        model.read(layout, held)
        chain = sorted((record for record in records if record.round % len(layouts) == layout.fragment), key=by_round)
        source, age = Source(mailbox, SystemClock(), manifest, layout), 2
        for back, record in enumerate(reversed(chain[-2:])):
            values = await parameters(source, record.round // len(layouts), record.sections)
            assert isinstance(values, np.ndarray)
            age = min(age, back if np.array_equal(values, held) else age)
        found.append(age)
    return found


def by_round(record):
    return record.round


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_fine_tune_one_adapter(base, tmp_path):
    places = os.pathsep.join([str(ROOT / "core"), str(ROOT)])
    common = {"PYTHONPATH": places, "MLX_DISABLE_COMPILE": "1", "GRADIENTMAIL_MAILBOX": (tmp_path / "run").as_uri()}
    nodes = {}
    for number, name in enumerate(("a", "b")):
        rest = command(base, tmp_path / name, "--train", "--learning-rate", "1e-2", "--seed", str(number))
        line = [sys.executable, "-m", "gradientmail_mlx.lora", "--node", name, *SETTINGS, *rest]
        nodes[name] = subprocess.Popen(
            line,
            env={**os.environ, **common},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    said = {name: node.communicate(timeout=200)[0] for name, node in nodes.items()}
    assert [node.returncode for node in nodes.values()] == [0, 0], said
    assert all("2 live nodes" in words for words in said.values()), "they were there together"
    found = {}
    for name in nodes:
        file = mx.load(str(tmp_path / name / "adapters.safetensors"))
        model, _ = load(str(base / "model"), adapter_path=str(tmp_path / name))
        loaded = dict(tree_flatten(model.parameters()))
        assert all(mx.array_equal(loaded[tensor], file[tensor]) for tensor in file)
        assert any(values.any() for tensor, values in file.items() if tensor.endswith("lora_b"))
        model.freeze()
        model.unfreeze(keys=["lora_a", "lora_b"])
        found[name] = asyncio.run(ages(MlxModel(model), DirectoryMailbox(tmp_path / "run")))
    assert all(max(each) <= 1 for each in found.values()), found
    assert [0, 0] in found.values(), "who left last holds the newest commit of every fragment"
    mailbox = DirectoryMailbox(tmp_path / "run")
    merged = [record for record in asyncio.run(tape(mailbox)) if len(record.participants) == 2]
    assert len(merged) >= 2
