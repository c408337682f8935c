"""One node's session around a call of mlx-lm's ``train``, on one process or several.

Every rank calls the same methods in the same order; only rank 0 has a session to act on. What the others
must know comes back with each call: the node's share of the global batch.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import mlx.core as mx

from gradientmail_core.adapters.mlx import MlxModel
from gradientmail_core.adapters.mlx_distributed import MlxRanks
from gradientmail_core.adapters.seeding import node_seed
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.session import Session

NO_SHARE = 0


class Node:
    """A node of a run. ``session`` is used on rank 0 only; on the others it never reaches the store.

    ``share`` is the number of rows the node's next optimizer step should see, or None to leave batches alone.
    A ``patient`` node keeps an error of its close for :meth:`raise_failure`.
    """

    def __init__(self, session: Session, model: MlxModel, *, patient: bool = False) -> None:
        self.ranks = MlxRanks(model, mx.distributed.init())
        self.share: int | None = None
        self._session = session if self.ranks.leads else None
        self._patient = patient
        self._failure: Exception | None = None

    def join(self) -> None:
        """Join the run, unless the session did; all ranks then hold the run's parameters and know the share."""
        self._run(lambda session: None if session.joined else session.join())

    def step(self, samples: int) -> None:
        """Count an optimizer step on this rank's ``samples``, and take what was committed."""
        total = self.ranks.total(samples)
        self._run(lambda session: session.step(total))

    def close(self) -> None:
        """Wait for the rounds in flight, set the model to the newest commit, and leave. Safe to call twice."""
        try:
            self._run(lambda session: session.close())
        except Exception as error:
            if not self._patient:
                raise
            self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise what the close could not do."""
        if self._failure is not None:
            raise self._failure

    def abort(self, reason: str) -> None:
        """Leave at once. Not a collective: a rank that fails calls it alone."""
        if self._session is not None:
            self._session.abort(reason)

    def seed(self, drawn: int) -> int:
        """A seed that all ranks share and no other node has; another one when the node comes back later."""
        session = self._session
        return self.ranks.run(lambda: node_seed(session.node, drawn + session.global_step) if session else 0)

    @contextmanager
    def validating(self, *, committed: bool) -> Iterator[None]:
        """Within this no round waits for the node; all ranks hold the newest commit, if ``committed``.

        An exception ends training, and is not a moment that all ranks share: then only rank 0 is put back.
        """
        with ExitStack() as stack:
            self._run(lambda session: session.joined and stack.enter_context(_lent(session, committed)))
            try:
                yield
            except GeneratorExit:
                self._run(lambda _: stack.close())
                raise
            self._run(lambda _: stack.close())

    def metrics(self) -> dict[str, float]:
        """The session's figures on rank 0; nothing on the others."""
        return self._session.metrics() if self._session is not None else {}

    def _run(self, work: Callable[[Session], object]) -> None:
        def led() -> int:
            assert self._session is not None
            work(self._session)
            return self._session.batch_size or NO_SHARE

        self.share = self.ranks.run(led) or None


def _lent(session: Session, committed: bool) -> AbstractContextManager[object]:
    return session.global_model() if committed else session.paused()


def adapter_of(session: Session, model: object = None) -> MlxModel:
    """The session's adapter; :class:`ConfigurationError` if it is not of an MLX module, or not of ``model``."""
    adapter = session.model
    if isinstance(adapter, MlxModel) and (model is None or model is adapter.module):
        return adapter
    raise ConfigurationError(
        "The session holds another model than the one to be trained.", "Give both the same mlx.nn.Module."
    )
