"""The demo's text: split by path, the same on every node."""

from pathlib import Path

import pytest
import torch

from gradientmail_core.errors import ConfigurationError
from gradientmail_lightning.demo.corpus import Windows, read_corpus, sample


def library(root: Path, files: int = 60) -> Path:
    for number in range(files):
        (root / f"module_{number}.py").write_text(f"value = {number}\n" * 20)
    (root / "test").mkdir()
    (root / "test" / "test_module.py").write_text("skipped = True\n")
    return root


def test_split_is_by_path_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = read_corpus(library(tmp_path)), read_corpus(tmp_path)
    assert torch.equal(first.train, second.train) and torch.equal(first.held_out, second.held_out)
    assert sum(first.files) == 60
    assert b"skipped" not in bytes(first.train.tolist())


def test_caps_hold(tmp_path: Path) -> None:
    corpus = read_corpus(library(tmp_path), train_bytes_max=1000, held_out_bytes_max=100)
    assert len(corpus.train) == 1000 and len(corpus.held_out) == 100


def test_no_source_text_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="too little Python source"):
        read_corpus(tmp_path)


def test_windows_cover_the_text_without_its_rest() -> None:
    windows = Windows(torch.arange(10, dtype=torch.uint8), 3)
    assert len(windows) == 3
    assert windows[2].tolist() == [6, 7, 8] and windows[2].dtype == torch.int64


def test_a_sample_is_always_the_same() -> None:
    text = torch.arange(250, dtype=torch.uint8)
    one, two = sample(text, 5, windows=8, batch=4), sample(text, 5, windows=8, batch=4)
    assert [batch.shape for batch in one] == [(4, 5), (4, 5)]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert len(sample(text[:7], 5, windows=8)) == 1
