"""Node processes: a failed one is reported with its own words, and none is left behind."""

from pathlib import Path

import pytest

from gradientmail_lightning.demo.processes import NodeFailed, Processes


def test_a_node_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(NodeFailed, match=r"Node a ended with code 2: .*unrecognized"), Processes(tmp_path) as nodes:
        nodes.start("a", ["--no-such-flag"])
        list(nodes.arrivals())


def test_a_killed_node_is_no_failure_and_none_is_left(tmp_path: Path) -> None:
    with Processes(tmp_path) as nodes:
        nodes.start("a", ["--late"])
        pid = nodes.kill("a")
        assert [arrival.message for arrival in nodes.arrivals()] == [None]
    assert not Path(f"/proc/{pid}/exe").exists()
