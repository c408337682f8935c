"""A training's whole state in the run's mailbox, for a process that starts under the same name without an adapter file.

Beside what :class:`~gradientmail_core.adapters.mlx_handoff.MlxHandoff` keeps, that is how many iterations lie behind,
and the place in the data. mlx-lm's batches come out of an iterator that does not tell where it is, and are shuffled by
numpy's global generator. So training draws from a state of that generator of its own, which validation and all else
leave alone, and the place is how many batches were drawn since which state: a new process draws as many and passes them
over. That finds the place in any ``iterate_batches`` that draws from nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias, cast

import numpy as np

from gradientmail_core.errors import ConfigurationError

Generator: TypeAlias = list[object]
"""The state of numpy's global generator, as plain values."""


class Place:
    """Where a training stands: part of its hand-off, and told of every batch by who draws them."""

    def __init__(self) -> None:
        self.iterations = 0
        self.rows = 0
        self.drawn = 0
        self.was_restored = False
        self._began: Generator = []
        self._now: Generator = []

    def begin(self, rows: int) -> None:
        """Batches of so many rows are drawn from here on, from a new iterator."""
        self.rows, self.drawn = rows, 0
        if not self._now:
            self._now = _state()
        self._began = self._now

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within this, numpy's global generator is the training's own."""
        others = _state()
        _set(self._now)
        try:
            yield
        finally:
            self._now = _state()
            _set(others)

    @contextmanager
    def drawing_again(self) -> Iterator[None]:
        """Within this, what was drawn since :meth:`begin` is drawn again; after it, the place is what it was."""
        now, self._now = self._now, self._began
        try:
            yield
        finally:
            self._now = now

    def state_dict(self) -> dict[str, object]:
        """The place as plain values."""
        counts = {"iterations": self.iterations, "rows": self.rows, "drawn": self.drawn}
        return {**counts, "began": self._began, "now": self._now}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Go on from there. Raises :class:`ConfigurationError` for what is no place."""
        match state_dict:
            case {
                "iterations": int(iterations), "rows": int(rows), "drawn": int(drawn),
                "began": list(began), "now": list(now),
            }:  # fmt: skip
                self.iterations, self.rows, self.drawn = iterations, rows, drawn
                self._began, self._now, self.was_restored = began, now, True
            case _:
                raise ConfigurationError("The hand-off holds no place in the data.", "Use another node name.")


def _state() -> Generator:
    name, words, *rest = cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state(legacy=True))
    return [name, words.tolist(), *rest]


def _set(state: Generator) -> None:
    name, words, *rest = state
    np.random.set_state((name, np.asarray(words, np.uint32), *rest))  # type: ignore[arg-type]  # as it was got
