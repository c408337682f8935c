"""A node's session, and its adapter."""

# what follows the skip needs mlx

import pytest

pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import torch

import gradientmail_core as gm
from gradientmail_core.errors import ConfigurationError
from gradientmail_mlx.node import Node as SessionNode
from gradientmail_mlx.node import adapter_of
from tests.mlx.nodes import Node


def test_the_share_comes_with_every_call(tmp_path):
    session = Node(tmp_path).session
    session.shares = {0: 8, 1: 4}
    node = SessionNode(session, session.model)
    node.join()
    shares = [node.share]
    node.step(5)
    assert [*shares, node.share] == [8, 4]
    assert session.samples == [5]


def test_without_a_share_batches_are_left_alone(tmp_path):
    session = Node(tmp_path).session
    node = SessionNode(session, session.model)
    node.join()
    assert node.share is None


def test_a_patient_node_keeps_the_error_of_its_close(tmp_path):
    for patient in (False, True):
        session = Node(tmp_path).session
        session.close = lambda: 1 // 0
        node = SessionNode(session, session.model, patient=patient)
        if not patient:
            with pytest.raises(ZeroDivisionError):
                node.close()
        else:
            node.close()
            with pytest.raises(ZeroDivisionError):
                node.raise_failure()


def test_a_session_of_another_framework_is_refused():
    session = gm.Session(torch.nn.Linear(2, 2), mailbox=gm.MemoryMailbox(), algorithm=gm.DiLoCo())
    with pytest.raises(ConfigurationError, match=r"another model.*mlx\.nn\.Module"):
        adapter_of(session)


@pytest.mark.parametrize(("committed", "calls"), [(False, ["pause", "resume"]), (True, ["lend", "return"])])
def test_a_validation_is_over_when_it_is_left_in_any_way(tmp_path, committed, calls):
    session = Node(tmp_path).session
    session.commits = {1: 0.5}
    node = SessionNode(session, session.model)
    node.join()

    def batches():
        with node.validating(committed=committed):
            yield from range(3)

    assert len(list(batches())) == 3
    left = batches()
    next(left)
    left.close()
    assert session.names == ["join", *calls, *calls]
    session.close()
    assert list(batches()) == [0, 1, 2], "after the end there is nothing to lend"
