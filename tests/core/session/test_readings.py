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
