"""The patterns as a training loop meets them, with real sessions on one mailbox."""

import threading
import time

import pytest

import gradientmail_core as gm
from gradientmail_core.sim.world import ToyModel

SETTINGS = gm.DiLoCo(sync_every=4, fragments=2)


def joined(mailbox: gm.Mailbox, node: str, **options) -> gm.Session:
    session = gm.Session(ToyModel(), mailbox=mailbox, algorithm=SETTINGS, node=node, callbacks=[], **options)
    session.join()
    return session


def test_two_nodes_share_the_units_and_meet_at_a_barrier() -> None:
    mailbox = gm.MemoryMailbox()
    trained: dict[str, list[int]] = {"a": [], "b": []}
    begun = threading.Event()

    def life(node: str, pause: float) -> None:
        with gm.Session(ToyModel(), mailbox=mailbox, algorithm=SETTINGS, node=node, callbacks=[]) as session:
            session.barrier("start", 2, timeout=60)
            if node == "a":
                begun.wait(60)
            for unit in session.shared_queue(units=24, block=2):
                trained[node].append(unit)
                begun.set()
                time.sleep(pause)
                session.step()

    threads = [threading.Thread(target=life, args=pair) for pair in (("a", 0.002), ("b", 0.05))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(trained["a"] + trained["b"]) == list(range(24))
    assert len(trained["a"]) > len(trained["b"]) > 0


def test_ranks_are_dealt_given_back_and_lost_to_a_slow_holder() -> None:
    mailbox = gm.MemoryMailbox()
    first = joined(mailbox, "a", ranks=2)
    second = joined(mailbox, "b", ranks=2, lease_timeout=0.6)
    assert (first.rank, second.rank) == (0, 1)
    first.close()
    third = joined(mailbox, "c", ranks=2, lease_timeout=0.6)
    assert third.rank == 0
    third.abort()
    second.abort()


def test_a_taker_is_told_when_the_slow_holder_is_back() -> None:
    mailbox = gm.MemoryMailbox()
    slow = joined(mailbox, "slow", ranks=1, lease_timeout=600)
    gone = threading.Event()
    taker = gm.Session(ToyModel(), mailbox=mailbox, algorithm=SETTINGS, node="taker", callbacks=[], lease_timeout=0.5)
    taker.join()
    assert taker._recipes is not None
    party = taker._recipes._party
    object.__setattr__(party, "alive", lambda node, since: not gone.is_set() or node != "slow")
    gone.set()
    assert taker._recipes.take_rank(1) == 0
    taker.step()
    gone.clear()
    with pytest.raises(gm.RankLost, match="Rank 0 went back"):
        for _ in range(600):
            time.sleep(0.02)
            taker.step()
    assert taker.rank is None
    taker.step()
    taker.abort()
    slow.abort()


def test_without_ranks_there_is_none() -> None:
    session = joined(gm.MemoryMailbox(), "a")
    assert session.rank is None
    with pytest.raises(gm.ConfigurationError, match="no ranks"):
        session.take_rank()
    session.close()
    with pytest.raises(gm.SessionClosed):
        session.barrier("late", 1)
