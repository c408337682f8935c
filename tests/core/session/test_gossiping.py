"""Sessions of gossip runs: the same steps, context and readings as any other session's."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import gradientmail_core as gm
from gradientmail_core.events import RoundMixed, SessionEnded
from gradientmail_core.sim.gossip import Bowl

MEANS = gm.FactoredGossip(
    sync_every=5, fragments=2, mix2=gm.All(), timeout=20.0, follow=False, global_batch_size=7, delta_codec="F32"
)


def train(session, model, steps, seed=0, pause=0.005):
    noise = np.random.default_rng(seed)
    for _ in range(steps):
        model.train(noise)
        session.step(8)
        time.sleep(pause)


def together(count, work, settings=MEANS):
    """``work(number, session, model)`` on threads, each a node of one run; the models and the mailbox."""
    mailbox, models, failures = gm.MemoryMailbox(), [Bowl() for _ in range(count)], []

    def node(number):
        try:
            options = {"algorithm": settings, "node": f"n{number}", "min_nodes": count, "callbacks": []}
            with gm.Session(models[number], mailbox=mailbox, lease_timeout=6.0, **options) as session:
                work(number, session, models[number])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=node, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return models, mailbox


def test_nodes_train_together_leave_at_the_mean_and_align_reads_it():
    seen = {}

    def work(number, session, model):
        train(session, model, 25, seed=number)
        share = session.batch_size
        train(session, model, 25, seed=10 + number)
        seen[number] = share, session.rounds_seen, session.versions, session.metrics()

    models, mailbox = together(3, work)
    flats = [model.flat() for model in models]
    assert flats[0].tobytes() == flats[1].tobytes() == flats[2].tobytes()
    share, rounds, versions, metrics = seen[1]
    assert (share, rounds, versions) == (3, 10, (10, 10))
    assert metrics["round"] == 10.0 and metrics["merged_tokens"] > 0
    other = Bowl()
    assert gm.align(other, mailbox=mailbox) == 50
    assert other.flat().tobytes() == flats[0].tobytes()


def test_the_global_model_is_lent_and_taken_back():
    lent = {}

    def work(number, session, model):
        train(session, model, 23, seed=number)
        before = model.flat()
        with session.global_model() as step:
            lent[number] = step, model.flat()
        assert model.flat().tobytes() == before.tobytes()

    together(2, work)
    assert lent[0][0] == 23 and np.abs(lent[0][1] - lent[1][1]).max() < 1.0


def test_a_restored_node_joins_from_the_mean():
    mailbox, model = gm.MemoryMailbox(), Bowl()
    with gm.Session(model, mailbox=mailbox, algorithm=MEANS, node="a", callbacks=[]) as session:
        train(session, model, 12)
        saved = session.state_dict()
    trained = model.flat()
    again = Bowl()
    session = gm.Session(again, mailbox=mailbox, algorithm=MEANS, node="a", callbacks=[])
    session.load_state_dict(saved)
    session.join()
    assert again.flat().tobytes() == trained.tobytes() and session.rounds_seen == saved["round"] + 1
    session.abort()


def test_an_exception_aborts_and_releases_the_lease():
    mailbox, events = gm.MemoryMailbox(), []
    with (
        pytest.raises(RuntimeError, match="the loop failed"),
        gm.Session(Bowl(), mailbox=mailbox, algorithm=MEANS, node="a", callbacks=[events.append]),
    ):
        raise RuntimeError("the loop failed")
    assert [event.reason for event in events if isinstance(event, SessionEnded)] == ["RuntimeError: the loop failed"]
    assert any("-x" in entry.key for entry in mailbox._entries("live/leases/", ""))


def test_without_mix2_a_step_never_waits():
    events, model = [], Bowl()
    settings = replace(MEANS, mix2=gm.Nothing())
    with gm.Session(model, mailbox=gm.MemoryMailbox(), algorithm=settings, callbacks=[events.append]) as session:
        train(session, model, 60)
        assert session.metrics()["stall_seconds"] == 0.0
    assert [event.round for event in events if isinstance(event, RoundMixed)] == list(range(12))


def test_a_node_whose_values_are_not_finite_leaves():
    class Broken(Bowl):
        def train(self, noise):
            for value in self.values.values():
                value += np.float32(np.nan)

    model = Broken()
    with (
        pytest.raises(gm.SessionFailed, match=r"3 rounds of .* not finite"),
        gm.Session(model, mailbox=gm.MemoryMailbox(), algorithm=MEANS, callbacks=[]) as session,
    ):
        train(session, model, 60)


def test_something_that_is_no_algorithm_is_refused():
    with pytest.raises(gm.ConfigurationError, match="no algorithm"):
        gm.Session(Bowl(), mailbox=gm.MemoryMailbox(), algorithm=gm.All())
