"""One process's part in a run, from joining to leaving: what a callback does to a session.

A node may be several processes. The first holds the session, and whatever it does with it the others mirror
(:mod:`gradientmail_core.adapters.torch_distributed`); so every method here that joins, steps, lends or leaves
is called by all of them at the same point. After each step all know the node's share of the global batch: it
travels with the word that ends the step.

:meth:`Membership.abort` is the one call that a process makes alone: it tells nobody and waits for nobody.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.adapters.torch_distributed import Alone, Processes
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.session import Session
from gradientmail_core.tensors.model import Model

logger = logging.getLogger("gradientmail")


class Membership:
    """``session`` is asked for once, on the leading process only, with the model that all processes follow."""

    def __init__(self, adapter: TorchModel, processes: Processes, open_session: Callable[[Model], Session]) -> None:
        self._adapter = adapter
        self._processes = processes
        self._session = open_session(processes.model) if processes.leads else None
        self._pending = 0
        self._lent = 0
        self._lending = ExitStack()
        self.share = 0

    @property
    def leads(self) -> bool:
        """Whether this process holds the session."""
        return self._processes.leads

    def join(self, saved: Mapping[str, object] | None = None) -> None:
        """Join the run, going on from ``saved`` where a checkpoint had it. Raises what the session raises.

        A state that no session can have written counts as none.
        """

        def work() -> int:
            session = self._held()
            if saved:
                try:
                    session.load_state_dict(saved)
                except ConfigurationError as error:
                    logger.warning("Joining without the checkpoint's state: %s", error)
            session.join()
            return session.batch_size or 0

        self.share = self._processes.run(work)

    def agreed(self, number: Callable[[], int]) -> int:
        """The leading process's ``number`` (an int64), on all of them."""
        return self._processes.run(number)

    def run_step(self) -> int:
        """The run's clock in optimizer steps, on all processes."""
        return self.agreed(lambda: self._held().global_step)

    def count(self, samples: int) -> None:
        """Note ``samples`` of this process, for the next step."""
        self._pending += samples

    def step(self, *, counted_by_all: bool) -> bool:
        """One optimizer step on what was counted since the last; True if the model took a commit.

        ``counted_by_all`` says that each process counted the samples of all of them.
        """
        pending, self._pending = self._pending, 0
        samples = pending if counted_by_all else self._processes.total(pending)
        word = self._processes.run(lambda: self._stepped(samples))
        self.share = word >> 1
        return bool(word & 1)

    def _stepped(self, samples: int) -> int:
        session = self._held()
        changed = session.step(samples)
        return (session.batch_size or 0) << 1 | int(changed)

    def check_trainable(self) -> None:
        """Raise :class:`ConfigurationError` if a parameter trains that the run knows nothing of."""
        added = self._adapter.newly_trainable()
        if added:
            names = ", ".join(added[:5]) + (" and more" if len(added) > 5 else "")
            raise ConfigurationError(
                f"{names} became trainable after the run was joined.",
                "Let everything that will train have requires_grad=True from the start, or start a new run after it.",
            )

    @contextmanager
    def evaluating(self, *, committed: bool) -> Iterator[None]:
        """Within this nobody waits for the node, and the model is the run's newest where ``committed``.

        May be nested. After an exception the local parameters are back, unless other processes would have to
        help with that: then training is over anyway.
        """
        self._lent += 1
        if self._lent == 1:
            self._enter(committed)
        try:
            yield
        except BaseException:
            self._lent -= 1
            if self._lent == 0 and isinstance(self._processes, Alone):
                self._lending.close()
            raise
        self._lent -= 1
        if self._lent == 0:
            self._exit(committed)

    def _enter(self, committed: bool) -> None:
        def work() -> int:
            session = self._held()
            self._lending.enter_context(session.global_model() if committed else session.paused())
            return 0

        if committed:
            self._processes.run(work)
        elif self.leads:
            work()

    def _exit(self, committed: bool) -> None:
        def work() -> int:
            self._lending.close()
            return 0

        if committed:
            self._processes.run(work)
        elif self.leads:
            work()

    def leave(self) -> None:
        """Wait for what is in flight, take the newest commit, and leave."""

        def work() -> int:
            self._held().close()
            return 0

        self._processes.run(work)
        self._processes.close()

    def abort(self, reason: str) -> None:
        """Leave without waiting or publishing; this process only. Never raises."""
        if self._session is not None:
            try:
                self._session.abort(reason)
            except Exception:
                logger.exception("The session could not be aborted in order")

    def figures(self) -> dict[str, float]:
        """The session's metrics by name; empty where another process holds it."""
        return self._session.metrics() if self._session is not None else {}

    def progress(self) -> dict[str, object]:
        """How far the run is, and what a session needs to go on from here; empty where another process holds it."""
        if self._session is None:
            return {}
        steps, rounds = self._session.global_step, self._session.rounds_seen
        return {"global_step": steps, "rounds": rounds, "session": self._session.state_dict()}

    def _held(self) -> Session:
        assert self._session is not None
        return self._session
