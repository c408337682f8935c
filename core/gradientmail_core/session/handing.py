"""Handing a node's whole state on to its next process through the mailbox, so that it needs no checkpoint of its own.

Now and then, after a step, the trainer's state is copied with the session's counters of the same moment and written in
the background. A process that starts under the same name gets it back before its first step, unless it was given a
checkpoint: what somebody names comes before what lies there.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from gradientmail_core.engine.handoff import ANEW, HandoffStore
from gradientmail_core.engine.resuming import Saved, parse_saved
from gradientmail_core.engine.run import Host
from gradientmail_core.errors import ConfigurationError, GradientMailError
from gradientmail_core.events import HandedOff, HandoffFailed, HandoffSkipped, StateOmitted
from gradientmail_core.protocol.belongings import Belongings
from gradientmail_core.session.background import Loop


class Handoff(Protocol):
    """A trainer's state: its parameters, its optimizer's, its place in the data. Both run on the training thread."""

    def save(self) -> Belongings:
        """A copy of all that the next process needs; later steps must not change it."""
        ...

    def load(self, belongings: Belongings) -> bool | None:
        """Go on from what :meth:`save` gave in an earlier process; False to decline it and start anew."""
        ...


@runtime_checkable
class Partial(Protocol):
    """A hand-off that cannot hold everything, and says so."""

    @property
    def omitted(self) -> Mapping[str, str]:
        """Parts of the state that :meth:`Handoff.save` left out, each with the reason."""
        ...


class Keeper:
    """Writes hand-offs every ``every`` steps, never two at once, and reads the newest one back."""

    def __init__(self, handoff: Handoff, every: int) -> None:
        if type(every) is not int or every < 1:
            raise ConfigurationError(f"handoff_every is {every!r}.", "Use a number of steps, such as 1000.")
        self._handoff = handoff
        self._every = every
        self._store: HandoffStore | None = None
        self._writing: Future[None] | None = None
        self._told: set[str] = set()

    def begin(self, host: Host, run: str) -> None:
        """Write to where ``host`` keeps its hand-offs of this run."""
        self._store = HandoffStore(host, run)

    def restored(self, loop: Loop, host: Host) -> Saved | None:
        """Set the trainer to the newest hand-off of this node; the session's counters in it, None without one."""
        assert self._store is not None
        found = loop.run(self._store.newest())
        if found is None:
            return None
        trainer, session = found.plain.get("trainer"), found.plain.get("session")
        try:
            if not isinstance(trainer, dict) or not isinstance(session, dict):
                raise ConfigurationError("It holds no state of a trainer and a session.")
            saved = parse_saved(session)
        except ConfigurationError as problem:
            host.emit(HandoffSkipped(host.node, "the newest", str(problem), ANEW))
            return None
        return None if self._handoff.load(Belongings(found.arrays, trainer)) is False else saved

    def stepped(self, loop: Loop, host: Host, step: int, session: Callable[[], Mapping[str, object]]) -> None:
        """After the node's ``step``-th step: begin a hand-off if one is due and none is under way."""
        if step % self._every or self._store is None or (self._writing is not None and not self._writing.done()):
            return
        try:
            trainer = self._handoff.save()
        except ConfigurationError as problem:
            host.emit(HandoffFailed(host.node, step, str(problem)))
            return
        self._tell(host)
        whole = Belongings(trainer.arrays, {"trainer": dict(trainer.plain), "session": dict(session())})
        self._writing = loop.spawn(_written(self._store, host, step, whole))

    def _tell(self, host: Host) -> None:
        """Say once of each part that hand-offs do without it."""
        omitted = self._handoff.omitted if isinstance(self._handoff, Partial) else {}
        for part, reason in omitted.items():
            if part not in self._told:
                self._told.add(part)
                host.emit(StateOmitted(host.node, part, reason))


async def _written(store: HandoffStore, host: Host, step: int, belongings: Belongings) -> None:
    started = host.clock.now()
    try:
        size = await store.put(belongings)
    except GradientMailError as problem:
        host.emit(HandoffFailed(host.node, step, str(problem)))
        return
    host.emit(HandedOff(host.node, step, size, host.clock.now() - started))
