"""The spool keeps contributions exactly, in memory while they fit and in an unnamed file when they do not."""

import gc
import os
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from gradientmail_core.algorithms.merge import Contribution, Rda
from gradientmail_core.algorithms.spool import OnDisk, Spool, SpoolFailed
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.encoded import Encoded, InMemory
from gradientmail_core.tensors.kernels import BLOCK, SPAN
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Piece

CODECS = ["F32", "BF16", "F8_E4M3", "F4", "INT8", "INT2", "TOPK(64/4096,INT2)"]


def encoded(name: str, values: Flat) -> InMemory:
    """Values in the bytes of a codec."""
    codec = codec_named(name)
    parts = [np.empty(part.nbytes, np.uint8) for part in codec.parts(values.size)]
    codec.encode(values, parts)
    return InMemory(codec, parts)


def values_of(size: int, seed: int = 0) -> Flat:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def read(held: Encoded, start: int, stop: int) -> bytes:
    return held.read(start, stop, np.empty(stop - start, np.float32)).tobytes()


def mapped_files() -> int:
    """Temporary files of spools that this process maps (Linux)."""
    return sum(line.endswith("(deleted)") for line in Path("/proc/self/maps").read_text().splitlines())


def test_contributions_within_the_budget_stay_in_memory() -> None:
    spool, first = Spool(100), encoded("F32", values_of(25))
    assert spool.kept(first) is first and spool.spooled == 0
    assert isinstance(spool.kept(encoded("F32", values_of(1))), OnDisk) and spool.spooled == 4
    assert spool.kept(encoded("F32", values_of(0))).read(0, 0, np.empty(0, np.float32)).size == 0


@pytest.mark.parametrize("name", CODECS)
def test_what_is_spooled_reads_back_bit_for_bit_and_unnamed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    size = SPAN + BLOCK + 4097
    held, spool = encoded(name, values_of(size)), Spool(0)
    kept = spool.kept(held)
    assert spool.spooled == sum(part.nbytes for part in held.parts)
    assert list(tmp_path.iterdir()) == []
    spans = [(0, SPAN), (SPAN, size), (BLOCK, 2 * BLOCK)]
    before = [read(held, *span) for span in spans]
    for part in held.parts:
        part[:] = 0
    assert [read(kept, *span) for span in spans] == before


def test_a_removed_folder_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    values = values_of(1000)
    kept = Spool(0).kept(encoded("F32", values))
    shutil.rmtree(folder)
    assert read(kept, 0, 1000) == values.tobytes()


def test_a_file_cut_short_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spooled"
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda prefix: path.open("w+b"))
    layout = FragmentLayout(0, (Piece("w", (3 * SPAN,), 0),))
    kept = Spool(0).kept(encoded("F32", values_of(layout.size)))
    os.truncate(path, 4 * SPAN)
    with pytest.raises(SpoolFailed, match=r"3145728 bytes has 1048576 left on disk.*TMPDIR"):
        Rda()([Contribution("a", 1.0, kept.read)], layout)


def test_a_full_disk_is_told_before_anything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(0)
    with Path("/dev/full").open("w+b") as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda prefix: full)
        with pytest.raises(OSError, match="No space left"):
            spool.kept(encoded("F32", values_of(BLOCK)))
    assert spool.spooled == 0


def test_a_merge_goes_on_when_its_round_is_given_up_and_then_frees_the_disk() -> None:
    layout = FragmentLayout(0, (Piece("w", (2 * SPAN,), 0),))
    held = [encoded("F32", values_of(layout.size, seed)) for seed in range(2)]
    maps, begun, dropped, merged = mapped_files(), threading.Event(), threading.Event(), []

    def slow(kept: Encoded, start: int, stop: int, out: Flat) -> Flat:
        begun.set()
        assert dropped.wait(30)
        return kept.read(start, stop, out)

    def merge(spool: Spool) -> None:
        kept = [spool.kept(one) for one in held]
        given = [Contribution(f"{n}", 1.0, lambda *span, one=one: slow(one, *span)) for n, one in enumerate(kept)]
        merged.append(Rda()(given, layout).delta)

    spool = Spool(0)
    thread = threading.Thread(target=merge, args=(spool,))
    thread.start()
    assert begun.wait(30)
    del spool
    gc.collect()
    dropped.set()
    thread.join()
    expected = Rda()([Contribution(f"{n}", 1.0, one.read) for n, one in enumerate(held)], layout).delta
    assert merged[0].tobytes() == expected.tobytes()
    del thread
    gc.collect()
    assert mapped_files() == maps


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        Spool(-1)
