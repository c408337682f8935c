"""Alignments: what becomes of a node's parameters when a commit arrives, and of the counters of its work.

A node trains on while its snapshot travels, so when the commit ``Θ`` is there its parameters ``θ`` have
moved on from the snapshot ``θs``. With ``Θ_base`` for the commit that it trained from:

=============  ==============================  ===================================  =================
alignment      snapshot merged                 snapshot not merged                  counters, merged
=============  ==============================  ===================================  =================
Overwrite      ``Θ``                           ``Θ``                                zeroed
Blend          ``m*θ + (1-m)*Θ``               ``m*θ + (1-m)*Θ``                    zeroed
Carry          ``Θ + (θ - θs)``                ``Θ``                                since the snapshot
Adaptive       as Carry or as Overwrite        ``Θ``                                likewise
Eager          ``Θ + (θ - E)``                 ``Θ``                                since the snapshot
=============  ==============================  ===================================  =================

With ``rebase`` a snapshot that was not merged is not lost whatever the alignment: ``Θ + (θ - Θ_base)``, all
counters kept. Otherwise counters are zeroed where work is dropped. Deltas are always taken against the
committed head, so what an alignment keeps is in the next delta, and the counters claim it there once: a
merged snapshot's steps are never claimed again. After a blend they start at zero, because what is left of
the old steps is a pull towards where the node was.

Everything here is a pure function of flat fp32 arrays of one fragment, elementwise, so it costs a few
copies.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

import numpy as np

from gradientmail_core.algorithms.outer import Outer
from gradientmail_core.algorithms.settings import Named, Settings, checked, named_from
from gradientmail_core.tensors.kernels import for_blocks
from gradientmail_core.tensors.model import Flat


@dataclass(frozen=True, slots=True)
class Overwrite(Named):
    """Take the commit; steps since the snapshot are dropped (Decoupled DiLoCo, arXiv 2604.21428)."""


@dataclass(frozen=True, slots=True)
class Blend(Named):
    """Mix the commit with the live parameters, ``mixing`` of them from 0 to 1 (Streaming DiLoCo, arXiv 2501.18512).

    0 is :class:`Overwrite`, 1 ignores the others; 0.5 is the paper's choice under overlap.
    """

    mixing: float = 0.5

    def __post_init__(self) -> None:
        checked("mixing", self.mixing, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Carry(Named):
    """Take the commit and put the steps since the snapshot on top (LOSCAR, arXiv 2605.20866, without its mask)."""


@dataclass(frozen=True, slots=True)
class Adaptive(Named):
    """:class:`Carry` while nodes agree, :class:`Overwrite` while they do not.

    Agreement is the round's mean pairwise cosine. ``hysteresis`` commits in a row at or above ``high`` turn
    carrying on, as many at or below ``low`` turn it off; it starts off. Between the two nothing changes.
    """

    high: float = 0.6
    low: float = 0.4
    hysteresis: int = 1

    def __post_init__(self) -> None:
        checked("low", self.low, -1.0, 1.0)
        checked("high", self.high, self.low, 1.0)
        checked("hysteresis", self.hysteresis, 1)


@dataclass(frozen=True, slots=True)
class Eager(Named):
    """Step at once on a guess of the commit, correct it when the commit is there (arXiv 2502.12996).

    When a snapshot is published the node takes the outer step itself, with its own fresh delta and the
    others' last (:func:`provisional`), and trains on from there (:func:`taken`).
    """


Alignment: TypeAlias = Overwrite | Blend | Carry | Adaptive | Eager
_KNOWN: tuple[type[Alignment], ...] = (Overwrite, Blend, Carry, Adaptive, Eager)


def alignment_settings(alignment: Alignment) -> Settings:
    """The alignment as plain JSON."""
    return alignment.settings()


def alignment_from(settings: Mapping[str, object]) -> Alignment:
    """The alignment that ``settings`` describes; :class:`ConfigurationError` if there is none such."""
    return named_from(settings, _KNOWN, "alignment")


class Kept(enum.Enum):
    """Which of a fragment's steps and tokens a node still claims after an alignment."""

    NOTHING = "nothing"
    SINCE_SNAPSHOT = "since the snapshot"
    EVERYTHING = "everything"

    def of(self, trained: int, since_snapshot: int) -> int:
        """The new counter, of ``trained`` steps (or tokens) in all and those ``since_snapshot``."""
        match self:
            case Kept.NOTHING:
                return 0
            case Kept.SINCE_SNAPSHOT:
                return since_snapshot
            case Kept.EVERYTHING:
                return trained


@dataclass(frozen=True, slots=True)
class Arrival:
    """A commit and where the node stands, one fragment as flat fp32 arrays of one size.

    ``commit`` is ``Θ``, ``live`` is ``θ``, ``base`` is ``Θ_base``. ``anchor`` is what the steps since the
    snapshot started from: the snapshot ``θs``, or the provisional ``E`` under :class:`Eager`; None without
    a snapshot. ``merged`` says whether the snapshot is among the commit's participants.
    """

    commit: Flat
    live: Flat
    base: Flat
    anchor: Flat | None
    merged: bool


@dataclass(frozen=True, slots=True)
class Mode:
    """Where :class:`Adaptive` stands: carrying or not, and the commits in a row that speak for a change."""

    carrying: bool = False
    streak: int = 0


def adapted(alignment: Adaptive, mode: Mode, cosine: float | None) -> Mode:
    """The mode after a commit with this mean pairwise ``cosine``; None (one contribution) changes nothing."""
    if cosine is None:
        return mode
    against = cosine <= alignment.low if mode.carrying else cosine >= alignment.high
    if not against:
        return replace(mode, streak=0)
    if mode.streak + 1 >= alignment.hysteresis:
        return Mode(not mode.carrying)
    return replace(mode, streak=mode.streak + 1)


def reads_live(alignment: Alignment, rebase: bool) -> bool:
    """Whether :func:`align` looks at the live parameters; if not, the commit is all that is needed."""
    return rebase or not isinstance(alignment, Overwrite)


def align(alignment: Alignment, arrival: Arrival, out: Flat, *, rebase: bool = False, mode: Mode = Mode()) -> Kept:
    """Write the aligned parameters to ``out``, which may be ``arrival.live``; return which counters stay.

    ``mode`` matters to :class:`Adaptive` only, and is the one after :func:`adapted`.
    """
    if rebase and not arrival.merged:
        _moved(arrival.live, arrival.base, arrival.commit, out)
        return Kept.EVERYTHING
    match alignment:
        case Overwrite():
            return _overwritten(arrival, out)
        case Blend(mixing):
            _mixed(arrival.live, arrival.commit, mixing, out)
            return Kept.NOTHING
        case Carry() | Eager():
            return _carried(arrival, out)
        case Adaptive():
            return _carried(arrival, out) if mode.carrying else _overwritten(arrival, out)
        case _:
            assert_never(alignment)


@dataclass(frozen=True, slots=True)
class LastRound:
    """What a node knows of the fragment's previous round, to guess the next: flat fp32 arrays.

    ``delta`` is the merged delta, ``own`` this node's delta in it and ``weight`` its share, 0 to 1.
    """

    delta: Flat
    own: Flat
    weight: float


def provisional(
    outer: Outer, base: Flat, state: tuple[Flat, ...], version: int, delta: Flat, last: LastRound, participants: int = 1
) -> Flat:
    """The guess ``E = outer(Θ_base, Δ_last + w*(Δ_now - Δ_own_last))`` of commit ``version``.

    ``delta`` is this node's fresh one; ``base`` and ``state`` are the committed parameters and outer state and
    stay as they are. A new array of the fragment's size.
    """
    guess = np.empty_like(delta)
    weight = np.float32(last.weight)

    def block(start: int, stop: int) -> None:
        part = guess[start:stop]
        np.subtract(delta[start:stop], last.own[start:stop], out=part)
        np.multiply(part, weight, out=part)
        np.add(part, last.delta[start:stop], out=part)

    for_blocks(guess.size, block)
    theta = base.copy()
    outer.step(theta, guess, tuple(part.copy() for part in state), version, participants)
    return theta


def taken(live: Flat, snapshot: Flat, guess: Flat, out: Flat) -> None:
    """The parameters after the provisional step, ``θ + (E - θs)``; ``out`` may be ``live``."""
    _moved(live, snapshot, guess, out)


def _overwritten(arrival: Arrival, out: Flat) -> Kept:
    for_blocks(out.size, lambda start, stop: np.copyto(out[start:stop], arrival.commit[start:stop]))
    return Kept.NOTHING


def _carried(arrival: Arrival, out: Flat) -> Kept:
    if not arrival.merged or arrival.anchor is None:
        return _overwritten(arrival, out)
    _moved(arrival.live, arrival.anchor, arrival.commit, out)
    return Kept.SINCE_SNAPSHOT


def _moved(live: Flat, origin: Flat, target: Flat, out: Flat) -> None:
    """``out = target + (live - origin)``."""

    def block(start: int, stop: int) -> None:
        part = out[start:stop]
        np.subtract(live[start:stop], origin[start:stop], out=part)
        np.add(part, target[start:stop], out=part)

    for_blocks(out.size, block)


def _mixed(live: Flat, commit: Flat, mixing: float, out: Flat) -> None:
    """``out = commit + mixing*(live - commit)``, exactly ``commit`` at 0."""

    def block(start: int, stop: int) -> None:
        part = out[start:stop]
        np.subtract(live[start:stop], commit[start:stop], out=part)
        np.multiply(part, np.float32(mixing), out=part)
        np.add(part, commit[start:stop], out=part)

    for_blocks(out.size, block)
