"""Real text that every machine already has: the source files of Python's standard library.

A file belongs to the training or to the held-out text by a hash of its path, so the split needs no list, is the
same on every node, and no file is in both. Files are taken in hash order up to a cap, which mixes the library's
packages however small the cap is.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gradientmail_core.errors import ConfigurationError

HELD_OUT_ONE_IN = 10
SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out text, each one long row of bytes, uint8; ``files`` counts the files of each."""

    train: Tensor
    held_out: Tensor
    files: tuple[int, int]


class Windows(Dataset[Tensor]):
    """A text cut into windows of ``length`` bytes, int64, which do not overlap; a rest at the end is left out."""

    def __init__(self, text: Tensor, length: int) -> None:
        self._text, self._length = text, length

    def __len__(self) -> int:
        return len(self._text) // self._length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._length
        return self._text[start : start + self._length].long()


def sample(text: Tensor, length: int, windows: int, batch: int = 32) -> list[Tensor]:
    """The same ``windows`` windows of a text on every call, in batches (batch, length) of one size, for evaluation.

    Fewer if the text is shorter; at least one.
    """
    rows = Windows(text, length)
    size = max(1, min(batch, len(rows)))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    starts = range(0, max(min(windows, len(rows)) - size, 0) + 1, size)
    return [torch.stack([rows[i] for i in order[start : start + size]]) for start in starts]


def standard_library() -> Path:
    """The directory of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(root: Path | None = None, train_bytes_max: int = 8 << 20, held_out_bytes_max: int = 1 << 20) -> Corpus:
    """Split and read the source files below ``root`` (the standard library's by default).

    Raises :class:`ConfigurationError` if there are too few files to train and evaluate on.
    """
    root = root or standard_library()
    ranked = sorted((_rank(path.relative_to(root)), path) for path in _sources(root))
    held_out = _text((path for rank, path in ranked if _is_held_out(rank)), held_out_bytes_max)
    train = _text((path for rank, path in ranked if not _is_held_out(rank)), train_bytes_max)
    if not (train[1] and held_out[1]):
        raise ConfigurationError(
            f"There is too little Python source text in {root} to train on.",
            "Install the standard library's source files.",
        )
    return Corpus(train[0], held_out[0], (train[1], held_out[1]))


def _sources(root: Path) -> Iterator[Path]:
    """Every source file; skipped folders are not entered, because installed packages can be a hundred times as many."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _rank(path: Path) -> int:
    """A hash of a relative path, equal on every platform."""
    return int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:8], "big")


def _is_held_out(rank: int) -> bool:
    return rank % HELD_OUT_ONE_IN == 0


def _text(paths: Iterable[Path], bytes_max: int) -> tuple[Tensor, int]:
    text, files = bytearray(), 0
    for path in paths:
        if len(text) >= bytes_max:
            break
        text += path.read_bytes()
        files += 1
    return torch.frombuffer(text[:bytes_max], dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8), files
