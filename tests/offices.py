"""A run whose syncer goes, for the tests of the plugins: what a node of role ``either`` does then.

Beside the node that is tested stand a syncer, which leaves once it has closed a round, and a learner, which never
closes and leaves once two more rounds were closed for it.
"""

import asyncio
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

import gradientmail_core as gm
from gradientmail_core.events import RoundCommitted, RunCreated, RunJoined, SyncerElected
from gradientmail_core.mailbox import DirectoryMailbox
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.protocol.plan import manifest_schema
from gradientmail_core.session.syncing import serve
from gradientmail_core.sim.checks import manifest_of
from gradientmail_core.sim.world import ToyModel

SETTINGS = gm.DiLoCo(sync_every=4, fragments=1, quorum_size=1, grace_seconds=0.05, follow=False)
LEASE_SECONDS = 1.5
PATIENCE = 60.0


class Arrays(ToyModel):
    """Zeros in the shapes of a run's tensors."""

    def __init__(self, folder: Path) -> None:
        manifest, _ = asyncio.run(manifest_of(DirectoryMailbox(folder)))
        self.schema = manifest_schema(manifest)
        self.frozen_fingerprint = manifest.frozen
        self.values = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in self.schema.tensors}


class Vacancy:
    """``heard`` is for the tested node's callbacks; :meth:`wait` for its trainer, after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.elections: list[bool] = []
        self.closed_in_office = 0
        self._created, self._syncing, self._synced, self._elected = (threading.Event() for _ in range(4))
        self._threads = [threading.Thread(target=self._sync), threading.Thread(target=self._learn)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for event in (self._created, self._syncing, self._synced, self._elected) if error is not None else ():
            event.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def heard(self, event: gm.Event) -> None:
        """What the tested node tells."""
        match event:
            case RunCreated():
                self._created.set()
            case SyncerElected(serving=serving):
                self.elections.append(serving)
                self._elected.set()
            case RoundCommitted() if self.elections:
                self.closed_in_office += 1
            case _:
                pass

    def wait(self, step: int) -> None:
        """Hold the trainer from its second step on until it was elected."""
        if step >= 2:
            self._elected.wait(PATIENCE)

    def _sync(self) -> None:
        async def main() -> None:
            stopping = asyncio.Event()

            def heard(event: gm.Event) -> None:
                if isinstance(event, RunJoined):
                    self._syncing.set()
                if isinstance(event, RoundCommitted):
                    self._synced.set()
                    stopping.set()

            timeouts = Timeouts(lease=LEASE_SECONDS)
            store = DirectoryMailbox(self.folder)
            await serve(store, node="s", stopping=stopping, timeouts=timeouts, callbacks=[heard])

        self._created.wait(PATIENCE)
        asyncio.run(main())

    def _learn(self) -> None:
        self._syncing.wait(PATIENCE)
        options: dict[str, Any] = {"node": "l", "role": "learner", "lease_timeout": LEASE_SECONDS, "callbacks": []}
        with gm.Session(Arrays(self.folder), mailbox=self.folder, algorithm=SETTINGS, **options) as session:
            self._train(session, self._synced.is_set)
            self._train(session, self._elected.is_set)
            closed = session.rounds_seen
            self._train(session, lambda: session.rounds_seen > closed + 1)

    def _train(self, session: gm.Session, until: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not until() and time.monotonic() < deadline:
            session.step()
            time.sleep(0.01)
