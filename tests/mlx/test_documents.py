"""The documents' mlx-lm programs run as they stand; only where the mailbox's URL leads is changed."""

# what follows the skip needs mlx

import re
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from gradientmail_core.session import aligning
from tests.mlx.nodes import Node, counting

ROOT = Path(__file__).parents[2]


def programs():
    """Every Python program of the documents that names this plugin."""
    for page in (ROOT / "README.md", ROOT / "docs" / "mlx.md"):
        for number, text in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)):
            if "gradientmail_mlx" in text:
                yield pytest.param(text, id=f"{page.name}-{number}")


@pytest.mark.parametrize("text", list(programs()))
def test_a_program_of_the_documents_trains(text, tmp_path, monkeypatch):
    node, opened, stock = Node(tmp_path), [], aligning.open_mailbox

    def elsewhere(url, **options):
        opened.append(str(url))
        return stock((tmp_path / "run").as_uri(), **options)

    monkeypatch.setattr(aligning, "open_mailbox", elsewhere)
    exec(
        compile(text, "a document", "exec"),
        {"model": node.model, "optimizer": node.optimizer, "data": counting(), "args": node.args},
    )
    assert opened == ["file:///mnt/shared/run-1"]
    assert node.optimizer.state["step"].item() == 6
    assert (tmp_path / "run" / "manifest.json").exists()
    assert node.file.keys() == node.tensors.keys()


def test_both_documents_have_one():
    assert len(list(programs())) == 2
