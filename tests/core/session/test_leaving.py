"""Who leaves is gone in bounded time, whatever the store does."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gradientmail_core as gm
from gradientmail_core.events import SessionEnded
from gradientmail_core.mailbox import directory, retrying
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


class Silent(gm.MemoryMailbox):
    """A store that does not answer at all from a moment on, not even to being closed."""

    def __init__(self) -> None:
        super().__init__("silent")
        self.fallen = threading.Event()

    async def _heard(self) -> None:
        if self.fallen.is_set():
            await asyncio.Event().wait()

    async def put(self, *arguments: Any, **options: Any) -> Any:
        await self._heard()
        return await super().put(*arguments, **options)

    async def get(self, *arguments: Any, **options: Any) -> Any:
        await self._heard()
        return await super().get(*arguments, **options)

    async def create(self, *arguments: Any, **options: Any) -> Any:
        await self._heard()
        return await super().create(*arguments, **options)

    async def delete(self, *arguments: Any, **options: Any) -> Any:
        await self._heard()
        return await super().delete(*arguments, **options)

    async def close(self) -> None:
        await self._heard()


def test_with_a_rank_and_units_in_hand_leaving_a_silent_store_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "RELEASE_SECONDS", 0.2)
    monkeypatch.setattr(retrying, "CLOSE_SECONDS", 0.2)
    mailbox, module = Silent(), torch.nn.Linear(4, 4)
    session = gm.Session(
        module, mailbox=mailbox, algorithm=gm.DiLoCo(sync_every=50), node="a", ranks=2, close_timeout=0.3, callbacks=()
    )
    with session:
        units = session.shared_queue(8, block=2)
        for _ in range(3):
            taken = units.take()
            assert taken is not None
            units.trained(taken)
            session.step()
        mailbox.fallen.set()
        began = time.monotonic()
    assert time.monotonic() - began < 20


def test_a_directory_whose_operations_block_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a hard mount of a file server that is gone: the threads themselves never come back."""
    monkeypatch.setattr(leaving, "RELEASE_SECONDS", 0.2)
    monkeypatch.setattr(directory, "CLOSE_SECONDS", 0.2)
    gone, back = threading.Event(), threading.Event()

    class Hard(gm.DirectoryMailbox):
        def _explaining(self, work: Any) -> Any:
            if gone.is_set():
                back.wait()
            return super()._explaining(work)

    session = gm.Session(
        torch.nn.Linear(4, 4),
        mailbox=Hard(tmp_path),
        algorithm=gm.DiLoCo(sync_every=2, fragments=1),
        node="a",
        close_timeout=0.3,
        callbacks=(),
    )
    try:
        with session:
            session.step()
            gone.set()
            session.step(), session.step()
            began = time.monotonic()
        assert time.monotonic() - began < 20
    finally:
        back.set()
