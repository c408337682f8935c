"""Who leaves is gone in bounded time, whatever the store does."""

import asyncio
import threading
from typing import Any

import pytest
import torch

import gradientmail_core as gm
from gradientmail_core.events import SessionEnded
from gradientmail_core.session import leaving


class FillingUp(gm.MemoryMailbox):
    """A store that is full from a moment on: what is there can be read, and nothing is written any more."""

    full = threading.Event()

    async def put(self, key: str, *arguments: Any, **options: Any) -> Any:
        if self.full.is_set():
            await asyncio.Event().wait()
        return await super().put(key, *arguments, **options)


@pytest.mark.parametrize("algorithm", [gm.DiLoCo(sync_every=2, fragments=1), gm.FactoredGossip.global_m1(sync_every=2)])
def test_leaving_a_store_that_takes_nothing_any_more_ends(
    algorithm: gm.DiLoCo | gm.FactoredGossip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk held ``close`` for as long as it was full, in the release of the lease."""
    monkeypatch.setattr(leaving, "RELEASE_SECONDS", 0.2)
    heard: list[gm.Event] = []
    mailbox, module = FillingUp(), torch.nn.Linear(4, 4)
    mailbox.full = threading.Event()
    session = gm.Session(
        module, mailbox=mailbox, algorithm=algorithm, node="a", close_timeout=0.3, callbacks=[heard.append]
    )
    with session:
        session.step()
        mailbox.full.set()
        session.step(), session.step()
    ended = [event.reason for event in heard if isinstance(event, SessionEnded)]
    assert len(ended) == 1 and "did not answer while leaving" in ended[0]
