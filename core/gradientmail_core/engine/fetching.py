"""What a closer asks the store for one round: each snapshot at most once at a time, and a listing of them all.

Asking for one snapshot costs a GET, found or not; a listing costs as much as twelve of them and shows a thousand
snapshots. So from twelve on that nobody has seen yet one listing is asked for, and then only what it shows: what a
round costs its closer grows with the snapshots that are there, not with nodes times questions.
"""

import asyncio
from collections.abc import Collection, Coroutine

LISTING = "/"  # no node's name
LISTED_FROM = 12
DOWNLOADS_AT_ONCE = 16


def asked_for(missing: Collection[str], listed: Collection[str]) -> tuple[list[str], bool]:
    """Of the nodes whose snapshots are missing, those to ask for one by one, in name order; and whether to list.

    ``listed`` are nodes whose snapshots are known to be there.
    """
    unseen = [node for node in missing if node not in listed]
    if len(unseen) < LISTED_FROM:
        return sorted(missing), False
    return sorted(node for node in missing if node in listed), True


class Fetches:
    """The requests of one round by node, or :data:`LISTING`. Downloads beyond :attr:`lines` wait for each other."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.lines = asyncio.Semaphore(DOWNLOADS_AT_ONCE)

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def idle(self, name: str) -> bool:
        """True unless such a request is under way; raises what the last one failed of."""
        task = self._tasks.get(name)
        if task is not None and task.done():
            task.result()
        return task is None or task.done()

    def begin(self, name: str, work: Coroutine[object, object, None]) -> None:
        """Ask; a request of that name must be idle."""
        self._tasks[name] = asyncio.ensure_future(work)

    def running(self) -> dict[str, asyncio.Task[None]]:
        """What is under way."""
        return {name: task for name, task in self._tasks.items() if not task.done()}

    def abandon(self) -> None:
        """Call everything off."""
        for task in self._tasks.values():
            task.cancel()
            task.add_done_callback(_heard)


def _heard(task: asyncio.Task[None]) -> None:
    """Take note of an abandoned request's error, so that nothing is logged about it."""
    if not task.cancelled():
        task.exception()
