"""The file beside a checkpoint: written whole, read with suspicion."""

import pytest

from gradientmail_hf.checkpoint import FILE, Progress, read_progress, write_progress


def test_what_is_written_is_read(tmp_path):
    write_progress(tmp_path, "a", {"global_step": 3, "session": {"run": "x"}}, {"pass": 1})
    assert read_progress(tmp_path) == Progress("a", {"run": "x"}, {"pass": 1})
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_two_nodes_in_one_folder_are_told_of(tmp_path, caplog):
    for node in ("a", "a", "b"):
        assert not caplog.records
        write_progress(tmp_path, node, {}, {})
    assert f"{tmp_path} is node a's, and b wrote over it: give each an output_dir" in caplog.text


def test_a_checkpoint_that_was_not_written_gets_no_file(tmp_path):
    write_progress(tmp_path / "nowhere", "a", {}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_the_file_has_no_progress(tmp_path, caplog):
    assert read_progress(tmp_path) is None
    assert read_progress(tmp_path / "nowhere") is None
    assert not caplog.records


CONTENTS = [
    "",
    '{"node": "no/name"}',
    "[]",
    "{",
    '{"node": 3}',
    '{"node": "a", "session": []}',
    '{"node": "a", "stream": 1}',
    "[" * 100_000,
]


@pytest.mark.parametrize("content", [*CONTENTS, b"\xff\xfe", " " * (1 << 21) + "{}"], ids=range(len(CONTENTS) + 2))
def test_anything_else_counts_as_none(tmp_path, caplog, content):
    (tmp_path / FILE).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read_progress(tmp_path) is None
    assert "resuming without it" in caplog.text
