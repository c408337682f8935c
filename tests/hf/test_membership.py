"""One process's part in a run, with a session that only takes notes."""

import pytest
import torch

from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.adapters.torch_distributed import Alone
from gradientmail_core.errors import ConfigurationError
from gradientmail_hf.membership import Membership
from tests.sessions import RecordingSession


class Following(Alone):
    """A process that does not lead, and whose leader always answers ``word``."""

    leads = False  # type: ignore[misc]  # a property of the base
    word = 0

    def run(self, work):
        return self.word


def member(processes=Alone, **options):
    sessions = []

    def opened(model):
        sessions.append(RecordingSession(model, **options))
        return sessions[-1]

    adapter = TorchModel(torch.nn.Linear(2, 1))
    return Membership(adapter, processes(adapter), opened), sessions


def test_counts_add_up_to_the_next_step():
    membership, (session,) = member(commits={2: 1.0})
    membership.join()
    membership.count(3)
    membership.count(4)
    assert not membership.step(counted_by_all=False)
    membership.count(5)
    assert membership.step(counted_by_all=True)
    assert session.samples == [7, 5]


def test_the_share_is_known_from_joining_on():
    membership, (session,) = member()
    session.shares = {0: 8, 2: 3}
    membership.join()
    shares = [membership.share]
    for _ in range(2):
        membership.step(counted_by_all=False)
        shares.append(membership.share)
    assert shares == [8, 8, 3]


def test_saved_state_is_loaded_before_joining():
    membership, (session,) = member()
    membership.join({"steps": 3})
    assert session.loaded == {"steps": 3}


def test_a_state_that_cannot_be_counts_as_none(caplog):
    membership, (session,) = member()

    def load(state):
        raise ConfigurationError("It is nonsense.", "Give another.")

    session.load_state_dict = load
    membership.join({"steps": "many"})
    assert session.names == ["join"]
    assert "Joining without the checkpoint's state: It is nonsense." in caplog.text
    membership, (session,) = member()
    membership.join({})
    assert session.loaded is None


def test_without_a_session_the_word_of_the_leader_counts():
    membership, sessions = member(Following)
    assert not sessions and not membership.leads
    Following.word = 6
    membership.join()
    assert membership.share == 6
    Following.word = 5 << 1 | 1
    assert membership.step(counted_by_all=False)
    assert membership.share == 5
    assert membership.figures() == {} and membership.progress() == {}
    with membership.evaluating(committed=False):
        pass
    membership.abort("gone")
    membership.leave()


@pytest.mark.parametrize(("committed", "names"), [(True, ["lend", "return"]), (False, ["pause", "resume"])])
def test_evaluations_within_evaluations_are_one(committed, names):
    membership, (session,) = member(commits={0: 1.0})
    with membership.evaluating(committed=committed), membership.evaluating(committed=committed):
        pass
    assert session.names == names


def test_what_becomes_trainable_is_named():
    module = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(4))).requires_grad_(False)
    module[0].weight.requires_grad_(True)
    adapter = TorchModel(module)
    membership = Membership(adapter, Alone(adapter), RecordingSession)
    membership.check_trainable()
    module.requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"0.bias, 1.bias, 1.weight, 2.bias, 2.weight and more became"):
        membership.check_trainable()
