"""The spool keeps bytes exactly, in memory while they fit and without a named file when they do not."""

import tempfile
from pathlib import Path

import pytest

from gradientmail_core.algorithms.spool import Spool
from gradientmail_core.errors import ConfigurationError


def test_bodies_within_the_budget_stay_in_memory() -> None:
    with Spool(100) as spool:
        kept = [spool.kept(bytes([number]) * 50) for number in range(2)]
        assert [bytes(view) for view in kept] == [b"\0" * 50, b"\1" * 50]
        assert spool.spooled == 0


def test_bodies_beyond_the_budget_are_mapped_back_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Spool(60) as spool:
        body = bytearray(range(50))
        views = [spool.kept(body), spool.kept(body), spool.kept(memoryview(body)[:10])]
        assert spool.spooled == 50
        assert list(tmp_path.iterdir()) == []
        body[:] = bytes(50)
        assert bytes(views[1]) == bytes(range(50))
        assert all(view.readonly for view in views)


def test_an_empty_body_needs_no_room() -> None:
    with Spool(0) as spool:
        assert bytes(spool.kept(b"")) == b""
        assert bytes(spool.kept(b"x")) == b"x"


def test_a_view_outlives_the_spool() -> None:
    with Spool(0) as spool:
        view = spool.kept(b"still here")
    assert bytes(view) == b"still here"


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        Spool(-1)
