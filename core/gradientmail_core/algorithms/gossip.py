"""Factored Gossip DiLoCo and its relatives, as one set of settings (arXiv 2606.22768; NoLoCo, 2506.10911).

There is no global outer state. Each node keeps its own parameters and its own outer momentum, and mixes twice a
round. *Mix1* takes the parameters that nodes start a round with; it is known at the start and is gathered while they
train, so it blocks nobody. *Mix2* takes the gradients of the round at its end; nodes wait for it, a bounded time.
With ``g`` the mixed outer gradient (start minus trained) and ``u`` a node's momentum, a round ends with

    u <- mu*u + g;   theta <- mix1(theta_start) - lr*(g + mu*u)

which is :class:`~gradientmail_core.algorithms.outer.Nesterov`'s step from the mixed start. With ``mix1=All()``,
``mix2=All()`` and equal starts that is DiLoCo. The steady disagreement of nodes on a convex problem is at most
``2 eta^2 sigma^2 H (1 + rho2/(1-rho1))`` (inner rate eta, gradient noise sigma, H steps a round, contractions
rho as in :mod:`gradientmail_core.algorithms.mixing`): Mix1 keeps it from adding up, Mix2 tightens it.

That bound is for an outer SGD of rate 1. A momentum of a node's own answers its own noise as well. Take ``Mix1 =
All``, ``Mix2 = Nothing`` and a direction in which a round closes the share ``kappa`` of the distance to the optimum
(next to 1 where the loss is steep). A node that starts ``e`` away from the mean then sends ``kappa*e + noise``, and

    Nesterov     u <- mu*u + kappa*e;  e <- -lr*(kappa*e + mu*u)      stable if lr*kappa < (1+mu)/(1+2*mu)
    heavy-ball   u <- mu*u + kappa*e;  e <- -lr*u                     stable if lr*kappa < 1+mu

DiLoCo's Nesterov, 0.7 and 0.9, is above its 0.679: each node swings ever further around the mean in steep directions,
where the mean itself, and so a DiLoCo, is stable. Heavy-ball of rate 1 and momentum 0.9 has the factor -0.1 there and
forgets noise at once: GlobalM1 takes that. A full Mix2 leaves no ``e``, and a partial one ``sqrt(rho2)`` of it on the
tensors that it takes: GlobalM1LocalM2 keeps DiLoCo's.

The paper's text was not at hand: the update is reconstructed from its captions, its bound and notes on it, and
checked against the bound. What it leaves open was decided so: momentum takes the mixed gradient; weights are
renormalised over those who answered; a fresh permutation is drawn each round.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, cast

from gradientmail_core.algorithms.mixing import All, Mix, Nothing, Pair, Peers, mix_from, mix_settings
from gradientmail_core.algorithms.outer import HeavyBall, Nesterov, Outer, outer_from, outer_settings
from gradientmail_core.algorithms.partition import ByBytes, Partition, block_number, partition_from, partition_settings
from gradientmail_core.algorithms.settings import Named, Settings, checked, named_from
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.schema import FragmentLayout, Piece, Schema, TensorSpec

NAME = "factored_gossip"
SENSITIVE = ("@embedding", "@head", "@blocks:2")
Pull: TypeAlias = Literal["base", "gradient"]
Probe: TypeAlias = Literal["l2", "js"]

OUTER = HeavyBall(lr=1.0, momentum=0.9)
"""Each node's own outer optimizer, where nothing else is asked for: see the module's docstring."""


@dataclass(frozen=True, slots=True)
class Strengthen(Named):
    """Mix2 becomes ``All()`` on all parameters for the rounds after one whose probe was above ``threshold``.

    ``probe`` is ``"l2"``, the root mean square over parameters of the nodes' distance from their mean, or ``"js"``,
    the Jensen-Shannon distance of their outputs, which follows loss spikes where L2 does not (section 5 of the
    paper) and needs a model with a probe. The creator of a round's roster decides, so all nodes agree.
    """

    threshold: float
    probe: Probe = "js"

    def __post_init__(self) -> None:
        checked("threshold", self.threshold, 0.0)
        if self.probe not in ("l2", "js"):
            raise ConfigurationError(f"Strengthen(probe={self.probe!r}).", 'Use "l2" or "js".')


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoredGossip:
    """Settings of a run without a global outer state.

    * ``sync_every``: optimizer steps of a round (H).
    * ``mix1``: how starts are mixed: ``All()``, ``Peers(k)``, ``Pair()`` or ``Nothing()``.
    * ``mix2``: how gradients are mixed, likewise; anything but ``Nothing()`` makes a node wait for its partners.
    * ``mix2_on``: the tensors that Mix2 takes, all by default: globs over canonical names, ``"@embedding"``,
      ``"@head"``, or ``"@blocks:n"``, the n shallowest blocks. Other gradients stay a node's own.
    * ``outer``: each node's outer optimizer.
    * ``timeout``: seconds a node waits at most for Mix2, from its own gradient's upload on.
    * ``rounds``: mixes in a row, for partial mixes; they contract by ``rho**rounds``.
    * ``average_momentum``: mix the outer state as the starts are; published runs saw loss spikes with it.
    * ``pull``: ``"base"`` steps from the mixed start; ``"gradient"`` steps from a node's own start and adds its
      distance from the mixed start to the gradient, so that momentum takes it in, as NoLoCo does.
    * ``follow``: a node that trains while its partners already wait, or others have gone on, ends its round with the
      steps it has; False always trains ``sync_every`` steps.
    * ``mean_every``: rounds between two means over all nodes where ``mix1`` is not ``All()``: joiners, ``align`` and
      exports start from the newest one.
    * ``fragments``: parts of the model with an averager each; as many as nodes spread the traffic evenly.
    * ``delta_codec``: wire format of starts (as differences to a mean that both sides hold) and of gradients;
      ``mean_codec`` that of means, as changes since the mean before.
    * ``probe_every``: rounds between two probes of the outputs, where the model has a probe.
    * ``strengthen``: see :class:`Strengthen`.
    * ``global_batch_size``: the batch the live nodes share; None leaves batches alone.
    """

    sync_every: int = 100
    fragments: int = 4
    mix1: Mix = field(default_factory=All)
    mix2: Mix = field(default_factory=Nothing)
    mix2_on: tuple[str, ...] = ()
    outer: Outer = OUTER
    timeout: float = 30.0
    rounds: int = 1
    average_momentum: bool = False
    pull: Pull = "base"
    follow: bool = True
    mean_every: int = 10
    partition: Partition = field(default_factory=ByBytes)
    delta_codec: str = "BF16"
    mean_codec: str = "BF16"
    probe_every: int = 1
    strengthen: Strengthen | None = None
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("sync_every", "fragments", "rounds", "mean_every", "probe_every"):
            value = getattr(self, name)
            _check(type(value) is int and value >= 1, f"{name}={value!r}", "Use a whole number from 1.")
        _check(self.fragments <= 999, f"fragments is {self.fragments}", "Use at most 999.")
        _check(self.rounds <= 9, f"rounds is {self.rounds}", "Use at most 9.")
        for name in ("mix1", "mix2"):
            _check(
                isinstance(getattr(self, name), All | Nothing | Pair | Peers),
                f"{name}={getattr(self, name)!r}",
                "Use All(), Peers(k), Pair() or Nothing().",
            )
        _check(
            0 < self.timeout < math.inf,
            f"timeout={self.timeout!r}",
            "Use seconds above 0.",
        )
        _check(self.pull in ("base", "gradient"), f"pull={self.pull!r}", 'Use "base" or "gradient".')
        _check(
            all(isinstance(pattern, str) for pattern in self.mix2_on),
            f"mix2_on={self.mix2_on!r}",
            "Use a tuple of patterns.",
        )
        _check(
            self.global_batch_size is None or self.global_batch_size >= 1,
            "global_batch_size is below 1",
            "Use the batch all nodes share, or None.",
        )
        codec_named(self.delta_codec)
        codec_named(self.mean_codec)

    @property
    def master_dtype(self) -> str:
        """The format in which the initial parameters are stored."""
        return "F32"

    @property
    def blocking(self) -> bool:
        """True if a node may wait for others at the end of a round."""
        return not isinstance(self.mix2, Nothing) or self.strengthen is not None

    def shared_settings(self) -> dict[str, object]:
        """What the manifest holds: plain JSON, equal on every node of a run, read back by :func:`gossip_from`."""
        return {
            "name": NAME,
            "sync_every": self.sync_every,
            "fragments": self.fragments,
            "mix1": mix_settings(self.mix1),
            "mix2": mix_settings(self.mix2),
            "mix2_on": list(self.mix2_on),
            "outer": outer_settings(self.outer),
            "timeout": self.timeout,
            "rounds": self.rounds,
            "average_momentum": self.average_momentum,
            "pull": self.pull,
            "follow": self.follow,
            "mean_every": self.mean_every,
            "partition": partition_settings(self.partition),
            "delta_codec": codec_named(self.delta_codec).name,
            "mean_codec": codec_named(self.mean_codec).name,
            "probe_every": self.probe_every,
            "strengthen": None if self.strengthen is None else self.strengthen.settings(),
            "global_batch_size": self.global_batch_size,
        }

    # -- presets -------------------------------------------------------------------------------------------

    @staticmethod
    def global_m1(sync_every: int = 100, **changes: object) -> "FactoredGossip":
        """GlobalM1: starts averaged over all nodes while they train, gradients not at all. Nobody ever waits.

        The paper's fastest variant (compute utilisation 100 % where DiLoCo has 53 %, at 200 Mbit/s and 1.5B
        parameters) and its weakest: perplexity 19.42 against DiLoCo's 18.65 after 10B tokens, and it can become
        unstable without any Mix2: see the module's docstring, which is why the outer optimizer is heavy-ball and not
        DiLoCo's Nesterov. ``docs/performance.md`` has both beside DiLoCo.
        """
        return _changed(FactoredGossip(sync_every=sync_every, mix1=All(), mix2=Nothing()), changes)

    @staticmethod
    def global_m1_local_m2(sync_every: int = 100, **changes: object) -> "FactoredGossip":
        """GlobalM1LocalM2: GlobalM1, and gradients of the sensitive tensors averaged with three peers.

        Embedding, head and the two shallowest blocks are 43 % of the paper's 1.5B model and were enough to make it
        as good as DiLoCo: perplexity 18.80 against 18.65 after 10B tokens, 15.60 against 15.52 after 30B. "Few"
        partners is all that is known of the paper's. In our study (``docs/performance.md``) the loss ends the further
        above DiLoCo's the fewer partners and the fewer tensors: ``mix2=Pair()`` downloads a third, ``mix2_on=()`` mixes
        every tensor, ``rounds=2`` twice. Outer Nesterov 0.7 and 0.9, as DiLoCo's.
        """
        return _changed(
            FactoredGossip(sync_every=sync_every, mix1=All(), mix2=Peers(3), mix2_on=SENSITIVE, outer=Nesterov()),
            changes,
        )

    @staticmethod
    def local_m1_local_m2(sync_every: int = 100, **changes: object) -> "FactoredGossip":
        """Both mixes in pairs: the least traffic that still keeps nodes together (the paper names it, no results).

        A pair's Mix1 leaves more noise in the starts than an average over all, which momentum amplifies: 0.5, as
        NoLoCo's, is our choice, and a warm-up of ten rounds.
        """
        outer = Nesterov(momentum=0.5, warmup=10.0)
        return _changed(FactoredGossip(sync_every=sync_every, mix1=Pair(), mix2=Pair(), outer=outer), changes)

    @staticmethod
    def noloco(sync_every: int = 50, **changes: object) -> "FactoredGossip":
        """NoLoCo (arXiv 2506.10911): pairs exchange parameters and gradients, and momentum takes in both.

        ``d <- mu*d + beta*mean(Delta) + gamma*(mean(phi) - phi)`` with ``beta = gamma = 0.7`` and ``mu = 0.5``, every
        50 steps: the values of the authors' code. With DiLoCo's momentum of 0.9 others saw it diverge.
        """
        outer = HeavyBall(lr=0.7, momentum=0.5, warmup=0.0)
        return _changed(
            FactoredGossip(sync_every=sync_every, mix1=Pair(), mix2=Pair(), outer=outer, pull="gradient"), changes
        )


def _changed(settings: "FactoredGossip", changes: Mapping[str, object]) -> "FactoredGossip":
    return replace(settings, **changes)  # type: ignore[arg-type]  # checked where it is made


def gossip_from(settings: Mapping[str, object]) -> FactoredGossip:
    """The settings that a manifest holds; :class:`ConfigurationError` if they are none of this algorithm."""
    if settings.get("name") != NAME:
        raise ConfigurationError(f"{settings.get('name')!r} is not {NAME}.", "Read a gossip run's manifest.")
    fields = {name: value for name, value in settings.items() if name != "name"}
    try:
        return FactoredGossip(**_read(fields))  # type: ignore[arg-type]  # checked where it is made
    except (TypeError, ValueError, OverflowError) as problem:
        raise ConfigurationError(f"The settings of {NAME} do not fit: {problem}") from problem


def _read(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields with the algorithms in them made from their own settings."""
    strengthen = fields.get("strengthen")
    made = {
        "mix1": mix_from(_part(fields, "mix1")),
        "mix2": mix_from(_part(fields, "mix2")),
        "mix2_on": tuple(cast("list[str]", fields.get("mix2_on", ()))),
        "outer": outer_from(_part(fields, "outer")),
        "partition": partition_from(_part(fields, "partition")),
        "strengthen": strengthen and named_from(_part(fields, "strengthen"), (Strengthen,), "option"),
    }
    return {**fields, **made}


def _part(fields: Mapping[str, object], name: str) -> Settings:
    part = fields.get(name)
    if not isinstance(part, dict):
        raise ConfigurationError(f"The settings of {NAME} have no {name}.", "Read a gossip run's manifest.")
    return cast(Settings, part)


def selected(schema: Schema, patterns: tuple[str, ...]) -> frozenset[str]:
    """Names of the tensors that Mix2 takes; all without a pattern.

    Raises :class:`ConfigurationError` for a glob that fits no tensor; a model may lack a head of its own, or blocks.
    """
    if not patterns:
        return frozenset(tensor.name for tensor in schema.tensors)
    return frozenset(tensor.name for pattern in patterns for tensor in _fitting(schema, pattern))


def _fitting(schema: Schema, pattern: str) -> list[TensorSpec]:
    if pattern in ("@embedding", "@head"):
        return [tensor for tensor in schema.tensors if tensor.role == pattern[1:]]
    if pattern.startswith("@blocks:"):
        count = pattern.removeprefix("@blocks:")
        _check(count.isdecimal(), f"mix2_on has {pattern!r}", 'Use "@blocks:2" for the two shallowest blocks.')
        numbers = sorted({number for t in schema.tensors if (number := block_number(t.name)) is not None})
        shallow = set(numbers[: int(count)])
        return [tensor for tensor in schema.tensors if block_number(tensor.name) in shallow]
    found = [tensor for tensor in schema.tensors if fnmatchcase(tensor.name, pattern)]
    _check(bool(found), f"mix2_on has {pattern!r}, which fits no tensor", "Use names of the model's own tensors.")
    return found


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a fragment that Mix2 takes: a layout of its own, and where it lies in the fragment.

    ``spans`` are half-open element ranges of the fragment, in order; ``layout`` holds their pieces back to back.
    """

    layout: FragmentLayout
    spans: tuple[tuple[int, int], ...]


def selection(layout: FragmentLayout, names: frozenset[str]) -> Selection | None:
    """The pieces of ``layout`` that are of these tensors; None if there are none."""
    pieces: list[Piece] = []
    spans: list[tuple[int, int]] = []
    offset = 0
    for piece in layout.pieces:
        if piece.name in names and piece.elements:
            pieces.append(replace(piece, offset=offset))
            spans.append((piece.offset, piece.offset + piece.elements))
            offset += piece.elements
    return Selection(FragmentLayout(layout.fragment, tuple(pieces)), tuple(spans)) if pieces else None


def with_state(layout: FragmentLayout, states: tuple[str, ...]) -> FragmentLayout:
    """A fragment's layout followed by its outer state, one copy of every piece for each state array."""
    pieces = list(layout.pieces)
    for number, state in enumerate(states, 1):
        pieces += [
            replace(piece, name=f"{state}/{piece.name}", offset=piece.offset + number * layout.size)
            for piece in layout.pieces
        ]
    return FragmentLayout(layout.fragment, tuple(pieces))


def _check(holds: bool, cause: str, remedy: str) -> None:
    if not holds:
        raise ConfigurationError(f"FactoredGossip: {cause}.", remedy)
