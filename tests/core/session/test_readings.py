"""What a session tells: counts and figures that a logger can take."""

import numpy as np
import torch

import gradientmail_core as gm


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8)


def test_batch_share_divides_the_global_batch() -> None:
    settings = gm.DiLoCo(global_batch_size=65)
    with gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=settings) as session:
        assert session.batch_size == 65


def test_metrics_are_plain_numbers() -> None:
    with gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=gm.DiLoCo(sync_every=1, fragments=1)) as session:
        for _ in range(3):
            session.step()
        figures = session.metrics()
    assert all(np.isfinite(value) for value in figures.values())
    assert figures["bytes_up"] > 0


def test_nothing_is_claimed_before_joining() -> None:
    session = gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=gm.DiLoCo(), callbacks=[])
    assert (session.rounds_seen, session.run_tokens, session.global_step, session.versions) == (0, 0, 0, ())
    assert not session.joined and not session.ended and not session.waiting
    assert session.metrics()["live_nodes"] == 0


def test_the_ledger_says_where_every_token_went() -> None:
    settings = gm.DiLoCo(sync_every=2, fragments=2, overlap_steps=0)
    session = gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=settings, node="a", callbacks=[])
    assert session.ledger.processed == 0 and session.ledger.balanced
    with session:
        for _ in range(5):
            session.step(samples=3)
        ledger = session.ledger
        assert ledger.processed == 15 and ledger.balanced and ledger.merged >= 9
        assert [books.processed for books in ledger.fragments] == [15, 15]
        assert ledger.nodes == {"a": sum(books.merged for books in ledger.fragments)}
        assert [entry.merged for entry in ledger.rounds if entry.fragment == 0] == [3, 6, 6]
    left = session.ledger
    assert left.balanced
    assert left.in_flight == left.carried == 0
    assert session.ledger.processed == 15 and session.ledger.dropped.keys() <= {"left"}


def test_the_ledger_of_a_gossip_node_balances() -> None:
    settings = gm.FactoredGossip.global_m1(sync_every=2)
    session = gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=settings, callbacks=[])
    with session:
        for _ in range(5):
            session.step(samples=3)
        assert session.ledger.balanced and session.ledger.processed == 15 and session.ledger.merged >= 12
