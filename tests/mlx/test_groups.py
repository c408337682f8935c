"""A node of two processes in one run: rank 0 holds the session, both hold the same parameters, and end together."""

# what follows the skip needs mlx

import pytest

pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from tests.mlx.ring import on_two_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    home = tmp_path_factory.mktemp("ranks")
    found = on_two_ranks(home, kind="train", mailbox=(home / "run").as_uri())
    assert list((home / "run" / "tape").rglob("*-0")), "rounds were committed"
    return found


def test_two_ranks_train_as_one_node(ranks):
    found = [rank["good"] for rank in ranks]
    assert [rank["error"] for rank in found] == ["", ""]
    assert [rank["steps"] for rank in found] == [8, 0], "only rank 0 was in the run"
    assert found[0]["parameters"] == found[1]["parameters"]
    assert found[0]["validated"] == found[1]["validated"]
    assert len(found[0]["validated"]) == 2
    assert [rank["rows"] for rank in found] == [[3] * 8, [3] * 8], "half of the share each"


def test_a_session_that_fails_on_rank_0_ends_training_on_both(ranks):
    errors = [rank["bad"]["error"] for rank in ranks]
    assert errors[0].startswith("ZeroDivisionError")
    assert errors[1].startswith("SessionFailed: The node's leading process failed")
