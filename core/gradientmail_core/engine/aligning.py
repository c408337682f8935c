"""One fragment of a model between its snapshots and its commits, on the training thread.

:mod:`gradientmail_core.algorithms.alignment` says what becomes of the parameters; an :class:`Aligner` remembers what
that needs (the snapshot, the provisional parameters, how nodes agreed) and does the copies. With
:class:`~gradientmail_core.algorithms.alignment.Overwrite` nothing is remembered and a commit is one write.

Deltas are taken against what the model *held* of the commit, which is not the commit where the model computes in
bf16 or fp16: the difference, which the node has not trained, would pull the run's fp32 parameters back to that coarse
grid, round after round. So for a model that rounds, each commit is read back after it was written. Whether a
fragment rounds is found out once, with numbers that only fp32 holds.

Merged buffers are taken as they were committed, whatever the alignment: a variance plus what this node's has moved
since its snapshot could come out below zero, and a statistic makes up for a few steps by itself.
"""

from dataclasses import dataclass, field

import numpy as np

from gradientmail_core.algorithms.alignment import (
    Adaptive,
    Alignment,
    Arrival,
    Eager,
    Kept,
    LastRound,
    Mode,
    Overwrite,
    adapted,
    align,
    provisional,
    reads_live,
    taken,
)
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.outer import Nesterov, Outer
from gradientmail_core.tensors.buffers import buffer_spans
from gradientmail_core.tensors.model import Flat, Model
from gradientmail_core.tensors.schema import FragmentLayout

REBASES_MOST = 3
START = Mode()
FINE = np.float32(1.0 + 2.0**-20)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a node aligns: its alignment, whether unmerged work is kept, and the run's outer optimizer."""

    alignment: Alignment = field(default_factory=Overwrite)
    rebase: bool = False
    outer: Outer = field(default_factory=Nesterov)

    @classmethod
    def of(cls, settings: DiLoCo) -> "Policy":
        """The policy in a node's settings."""
        return cls(settings.alignment, settings.stale == "rebase", settings.outer)

    @property
    def needs_outer(self) -> bool:
        """Whether commits must come with their outer state."""
        return isinstance(self.alignment, Eager)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What :class:`Eager` asks of a commit: outer state, merged delta, the node's own weight, how many took part."""

    state: tuple[Flat, ...]
    delta: Flat
    weight: float
    participants: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What an alignment goes by besides parameters: where :class:`Adaptive` stands, and rebases in a row."""

    mode: Mode = START
    rebased: int = 0


FRESH = Memory()


class Aligner:
    """One fragment of a model: ``base`` is the commit last aligned with, ``held`` what the model kept of it.

    It starts by setting the model to ``theta``, unless it is to ``keep`` what was trained from there.
    """

    def __init__(
        self,
        model: Model,
        layout: FragmentLayout,
        theta: Flat,
        policy: Policy,
        *,
        keep: bool = False,
        memory: Memory = FRESH,
    ) -> None:
        self._model = model
        self._layout = layout
        self._buffers = buffer_spans(layout)
        self._policy = policy
        self._snapshot: Flat | None = None
        self._anchor: Flat | None = None
        self._delta: Flat | None = None
        self._guessing: tuple[LastRound, Outcome] | None = None
        self._mode = memory.mode
        self._rebased = memory.rebased
        trained = self._read() if keep else None
        self._rounds = _rounds(model, layout)
        self.base = theta
        self.held = self._written(theta)
        if trained is not None:
            model.write(layout, trained)

    @property
    def memory(self) -> Memory:
        """What a checkpoint keeps of it."""
        return Memory(self._mode, self._rebased)

    def taken(self, values: Flat, version: int) -> None:
        """A snapshot was read from the model as it is now; ``version`` is the one it was trained from."""
        if isinstance(self._policy.alignment, Overwrite):
            return
        self._snapshot = self._anchor = values.copy()
        if isinstance(self._policy.alignment, Eager):
            self._delta = self.held - values
            self._step_ahead(self._delta, version)

    def arrived(
        self, theta: Flat, *, merged: bool, cosine: float | None, outcome: Outcome | None = None, spoilt: bool = False
    ) -> Kept:
        """Write a commit into the model; which of the fragment's counters stay.

        ``spoilt`` says that the snapshot was refused for its values: nothing of them is kept.
        """
        alignment = self._policy.alignment
        if isinstance(alignment, Adaptive):
            self._mode = adapted(alignment, self._mode, cosine)
        rebase = self._policy.rebase and not merged and not spoilt and self._rebased < REBASES_MOST
        live = self._live(rebase) if reads_live(alignment, rebase) and not spoilt else None
        arrival = Arrival(theta, theta if live is None else live, self.held, self._anchor, merged)
        self.base = self.held = theta
        if live is None or self._rounds:
            self.held = self._written(theta)
        kept = Kept.NOTHING
        if live is not None:
            kept = align(alignment, arrival, live, rebase=rebase, mode=self._mode)
            for span in self._buffers:
                live[span] = theta[span]
            self._model.write(self._layout, live)
        self._rebased = self._rebased + 1 if kept is Kept.EVERYTHING else 0
        self._remember(outcome if merged else None)
        return kept

    def forget(self) -> None:
        """Set the model to the commit and drop what was trained since, for good."""
        self._snapshot = self._anchor = self._delta = self._guessing = None
        self.settle()

    def settle(self) -> None:
        """Set the model to the commit."""
        self._model.write(self._layout, self.base)

    def _step_ahead(self, delta: Flat, version: int) -> None:
        """Take the provisional step, where the last round is known and this node was in it."""
        if self._guessing is None or self._snapshot is None:
            return
        last, outcome = self._guessing
        guess = provisional(
            self._policy.outer, self.base, outcome.state, version + 1, delta, last, outcome.participants
        )
        for span in self._buffers:
            guess[span] = self._snapshot[span]
        self._anchor = self._written(guess)

    def _live(self, rebase: bool) -> Flat:
        """The model's parameters; to be kept on another base, without the provisional step."""
        live = self._read()
        if rebase and self._snapshot is not None and self._anchor is not None and self._anchor is not self._snapshot:
            taken(live, self._anchor, self._snapshot, live)
        return live

    def _remember(self, outcome: Outcome | None) -> None:
        own, self._guessing = self._delta, None
        self._snapshot = self._anchor = self._delta = None
        if outcome is not None and own is not None:
            self._guessing = LastRound(outcome.delta, own, outcome.weight), outcome

    def _written(self, values: Flat) -> Flat:
        """Write ``values``; what the model holds of them."""
        self._model.write(self._layout, values)
        return self._read() if self._rounds else values

    def _read(self) -> Flat:
        values = np.empty(self._layout.size, np.float32)
        self._model.read(self._layout, values)
        return values


def _rounds(model: Model, layout: FragmentLayout) -> bool:
    """Whether the model keeps less of a value than fp32 does; leaves its parameters overwritten."""
    fine = np.full(layout.size, FINE, np.float32)
    model.write(layout, fine)
    held = np.empty_like(fine)
    model.read(layout, held)
    return not np.array_equal(held, fine)
