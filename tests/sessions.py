"""A session that only takes notes, for the tests of the plugins."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradientmail_core.tensors.model import Model
from gradientmail_core.tensors.schema import FragmentLayout, Piece

LAST = 0
"""The key of the commit that a recording session writes when it is closed."""


def whole(model: Model) -> FragmentLayout:
    """All tensors of ``model`` in one fragment."""
    pieces, offset = [], 0
    for tensor in model.schema.tensors:
        pieces.append(Piece(tensor.name, tensor.shape, offset))
        offset += tensor.elements
    return FragmentLayout(0, tuple(pieces))


class RecordingSession:
    """Stands in for a session: notes its calls, and writes ``commits[n]`` everywhere at its n-th step."""

    def __init__(self, model: Model, commits: dict[int, float] | None = None) -> None:
        self.model = model
        self.shares: dict[int, int] = {}
        self.start = 0
        self.loaded: Any = None
        self.commits = commits or {}
        self.calls: list[Any] = []
        self.joined_with: np.ndarray | None = None
        self.before_commit: list[np.ndarray] = []
        self.fail_at: int | None = None

    @property
    def samples(self) -> list[int]:
        """What each step was told."""
        return [call[1] for call in self.calls if call[0] == "step"]

    @property
    def names(self) -> list[str]:
        """The calls without their arguments, steps in a row as one."""
        names = [call[0] for call in self.calls]
        return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]

    @property
    def steps(self) -> int:
        """How many steps this session was told of."""
        return len(self.samples)

    @property
    def global_step(self) -> int:
        return self.start + self.steps

    @property
    def batch_size(self) -> int | None:
        """What ``shares`` says of the last step that it names."""
        past = [step for step in self.shares if step <= self.steps]
        return self.shares[max(past)] if past else None

    @property
    def rounds_seen(self) -> int:
        return sum(step <= self.steps for step in self.commits)

    def values(self) -> np.ndarray:
        """The model's parameters."""
        layout = whole(self.model)
        out = np.empty(layout.size, np.float32)
        self.model.read(layout, out)
        return out

    def join(self) -> None:
        self.calls.append(("join",))
        self.joined_with = self.values()

    def step(self, samples: int = 1) -> bool:
        self.calls.append(("step", samples))
        if self.fail_at == self.steps:
            raise RuntimeError("the store is gone")
        if self.steps not in self.commits:
            return False
        self._commit(self.steps)
        return True

    def close(self) -> None:
        self.calls.append(("close",))
        if LAST in self.commits:
            self._commit(LAST)

    def _commit(self, number: int) -> None:
        self.before_commit.append(self.values())
        layout = whole(self.model)
        self.model.write(layout, np.full(layout.size, self.commits[number], np.float32))

    def abort(self, reason: str = "aborted") -> None:
        self.calls.append(("abort", reason))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.calls.append(("pause",))
        try:
            yield
        finally:
            self.calls.append(("resume",))

    @contextmanager
    def global_model(self) -> Iterator[int]:
        """Lends the value that was committed last."""
        own = self.values()
        layout = whole(self.model)
        self.model.write(layout, np.full(layout.size, list(self.commits.values())[self.rounds_seen - 1], np.float32))
        self.calls.append(("lend",))
        try:
            yield self.global_step
        finally:
            self.model.write(layout, own)
            self.calls.append(("return",))

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        assert not self.calls, "the state is loaded before the run is joined"
        self.loaded = state

    def metrics(self) -> dict[str, float]:
        return {"round": float(self.rounds_seen), "live_nodes": 2.0, "bytes_up": 5.0}
