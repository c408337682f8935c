"""DiLoCo and its streaming and decoupled forms, as one set of settings.

Learners train on their own; every ``sync_every`` steps each fragment of the model is merged across
them and moved by an outer optimizer (DiLoCo, arXiv 2311.08105; fragments and overlap, Streaming DiLoCo,
2501.18512; quorum, grace and radial-directional averaging, Decoupled DiLoCo, 2604.21428).

Settings that decide what is committed are the run's: they stand in its manifest and every node must
have the same. The others (:data:`OWN`) are each node's own: they decide what a node does with what was
committed, or how its bytes travel, and every node reads what any other may write.

The presets are these settings at the values of a paper, with one change: the momentum of Nesterov's warms up
(:class:`~gradientmail_core.algorithms.outer.Nesterov`), where the papers keep it constant. In the study that chose
the warm-up (``docs/performance.md``) the default never ended above one node alone and constant momentum did. Every
value can be overridden: ``DiLoCo.streaming(sync_every=50)``.
"""

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Literal, Self, TypeAlias, get_args

from gradientmail_core.algorithms.alignment import Alignment, Blend, Carry, Eager, Overwrite
from gradientmail_core.algorithms.merge import Merge, Rda, WeightedMean, merge_from, merge_settings
from gradientmail_core.algorithms.outer import SGD, Nesterov, Outer, outer_from, outer_settings
from gradientmail_core.algorithms.partition import ByBytes, Partition, Strided, partition_from, partition_settings
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.link import Compression
from gradientmail_core.tensors.codecs import codec_named

Dtype: TypeAlias = Literal["F32", "F16", "BF16"]
"""A number format for state: one value after the other, a sign, an exponent and a mantissa each."""

ResidualDtype: TypeAlias = Literal["F32", "BF16"]
Stale: TypeAlias = Literal["reject", "rebase"]
ShareRule: TypeAlias = Literal["equal", "speed"]

SHOWN_CHARACTERS = 200
EVERYONE = 2**31 - 1
"""A ``quorum_size`` that always means all live learners."""

OWN = frozenset(
    {
        "in_flight",
        "overlap_steps",
        "follow",
        "alignment",
        "stale",
        "error_feedback",
        "compression",
        "merge_memory",
        "flush_on_close",
    }
)
"""Settings that are each node's own."""

_ALIASED = {"delta_dtype": "delta_codec", "commit_dtype": "commit_codec", "mixing": "alignment"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo:
    """Settings of a run.

    * ``sync_every``: optimizer steps between two merges of the same fragment (H).
    * ``fragments``: parts of the model merged in turn (P), at most ``sync_every``.
    * ``in_flight``: snapshots a node may have outstanding, at most one for each fragment.
    * ``overlap_steps``: steps a node trains on while a snapshot of it is outstanding; 0 is DiLoCo's barrier,
      None never stops.
    * ``quorum_size``: accepted snapshots that close a round; more than there are live learners means all.
    * ``grace_seconds``: how long a closer waits for others after quorum; None adapts to the step time.
    * ``follow``: False publishes at the due step only; None publishes a step or more early when the round is
      about to close without this node; a number does so as soon as that many others have published.
    * ``flush_on_close``: a node that leaves publishes what it trained since each fragment's last round, and waits for
      the rounds that take it in. A round in which only leaving nodes take part moves the parameters by the outer rate
      times their mean delta, without momentum.
    * ``alignment``: what becomes of the steps that a node trained since its snapshot when a commit arrives: they stay
      on top of it (``Carry()``), or are dropped (``Overwrite()``), or one of the others.
    * ``stale``: whether a node whose snapshot was not merged drops that work ("reject") or keeps it on top of the
      commit for the next round ("rebase", three rounds in a row at most).
    * ``delta_codec``: wire format of the deltas, such as ``"BF16"``, ``"INT4"`` or ``"TOPK(64/4096,INT2)"``.
    * ``error_feedback``: keep what the codec left out of a delta and add it, times this decay, to the next one; None
      for none, True for 1.
    * ``commit_codec``: also publish each commit's change in this format, so that a node with the version before
      downloads that and not the parameters. The parameters are then the old ones plus the decoded change. Fragments
      that hold merged buffers (``buffers="mean"``) are committed whole all the same, so that these stay exact.
    * ``full_every``: with ``commit_codec``, publish the parameters themselves with every n-th version only.
    * ``master_dtype``, ``momentum_dtype``: formats in which the committed parameters and the outer optimizer's state
      are stored; the next round goes on from what was stored.
    * ``residual_dtype``: format of what rounding leaves out: of the committed parameters, kept with the outer state
      and added before the next step, and of a node's deltas under ``error_feedback``. None keeps nothing.
    * ``compression``: "zstd", "auto" (where it is faster than this node's link) or None.
    * ``merge_memory``: bytes of one round's contributions that a closer holds in memory; more go to disk.
    * ``tokens_per_step_max``: a bound on what one optimizer step of one node may claim, in samples or tokens.
    * ``global_batch_size``: the batch the live nodes share; None leaves batches alone.
    * ``share``: whether they share it "equal"-ly, each part rounded up, or by measured "speed", in whole samples that
      add up to it.
    * ``joiner_ramp``: rounds of a fragment in which a node that has just joined weighs less, since its inner optimizer
      starts cold: with 2 its weight is a third, then two thirds, then whole. 0 for none. Who resumes is not new.

    Names that the field uses are taken too: ``delta_dtype``, ``commit_dtype`` for the codecs, ``mixing=m`` for
    ``alignment=Blend(m)``, ``outer_lr`` and ``outer_momentum`` for those of ``outer``.

    Raises :class:`ConfigurationError` for what cannot work.
    """

    sync_every: int = 100
    fragments: int = 4
    in_flight: int = 2
    overlap_steps: int | None = None
    follow: int | bool | None = None
    quorum_size: int = 1
    grace_seconds: float | None = None
    outer: Outer = field(default_factory=Nesterov)
    merge: Merge = field(default_factory=Rda)
    partition: Partition = field(default_factory=ByBytes)
    alignment: Alignment = field(default_factory=Carry)
    stale: Stale = "rebase"
    delta_codec: str = "BF16"
    error_feedback: float | bool | None = None
    commit_codec: str | None = None
    full_every: int = 1
    master_dtype: Dtype = "F32"
    momentum_dtype: Dtype = "F32"
    residual_dtype: ResidualDtype | None = "F32"
    compression: Compression | None = "auto"
    merge_memory: int = 2**29
    tokens_per_step_max: int = 2**24
    global_batch_size: int | None = None
    share: ShareRule = "equal"
    joiner_ramp: int = 0
    flush_on_close: bool = False
    delta_dtype: InitVar[str | None] = None
    commit_dtype: InitVar[str | None] = None
    mixing: InitVar[float | None] = None
    outer_lr: InitVar[float | None] = None
    outer_momentum: InitVar[float | None] = None

    def __post_init__(
        self,
        delta_dtype: str | None,
        commit_dtype: str | None,
        mixing: float | None,
        outer_lr: float | None,
        outer_momentum: float | None,
    ) -> None:
        self._take("delta_codec", delta_dtype, "BF16", "delta_dtype")
        self._take("commit_codec", commit_dtype, None, "commit_dtype")
        if mixing is not None:
            self._take("alignment", Blend(mixing) if mixing else Overwrite(), Carry(), "mixing")
        for name, value in (("lr", outer_lr), ("momentum", outer_momentum)):
            if value is not None:
                self._set("outer", _with(self.outer, name, value))
        self._check_rounds()
        self._check_arithmetic()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _take(self, name: str, value: object, default: object, alias: str) -> None:
        """Set a field from its other name."""
        if value is None:
            return
        _check(
            getattr(self, name) in (default, value),
            f"{name}={getattr(self, name)!r} and {alias} are both given",
            f"Use one of the two names, {name} or {alias}.",
        )
        self._set(name, value)

    def _check_rounds(self) -> None:
        for name, least in (("sync_every", 1), ("fragments", 1), ("in_flight", 1), ("quorum_size", 1)):
            _check(isinstance(getattr(self, name), int), f"{name}={getattr(self, name)!r}", "Use a whole number.")
            _check(getattr(self, name) >= least, f"{name} is {getattr(self, name)}", f"Use {least} or more.")
        _check(
            self.fragments <= self.sync_every,
            f"fragments={self.fragments} is more than sync_every={self.sync_every}",
            "Each fragment needs a due step of its own: use fewer fragments or a larger sync_every.",
        )
        _check(self.fragments <= 999, f"fragments is {self.fragments}", "Use at most 999.")
        _check(
            self.overlap_steps is None or self.overlap_steps >= 0,
            "overlap_steps is negative",
            "Use 0 or more, or None.",
        )
        _check(
            self.grace_seconds is None or 0 <= self.grace_seconds < math.inf,
            "grace_seconds is negative",
            "Use 0 or more, or None.",
        )
        _check(
            self.follow is None or self.follow is False or (type(self.follow) is int and self.follow >= 1),
            f"follow={self.follow!r}",
            "Use None (adaptive), False (at the due step), or how many others must have published first.",
        )
        _check(self.tokens_per_step_max >= 1, "tokens_per_step_max is below 1", "Use the largest honest batch.")
        _check(
            self.global_batch_size is None or self.global_batch_size >= 1,
            "global_batch_size is below 1",
            "Use the batch all nodes share, or None.",
        )
        ramp = self.joiner_ramp
        _check(type(ramp) is int and 0 <= ramp <= 100, f"joiner_ramp={ramp!r}", "Use 0 to 100 rounds.")

    def _check_arithmetic(self) -> None:
        codec_named(self.delta_codec)
        codec_named(self.commit_codec or "F32")
        _check(isinstance(self.alignment, get_args(Alignment)), f"alignment={self.alignment!r}", "Use Overwrite().")
        for name, known in (
            ("stale", get_args(Stale)),
            ("share", get_args(ShareRule)),
            ("master_dtype", get_args(Dtype)),
            ("momentum_dtype", get_args(Dtype)),
            ("residual_dtype", (*get_args(ResidualDtype), None)),
            ("compression", (*get_args(Compression), None)),
        ):
            value = getattr(self, name)
            _check(value in known, f"{name}={value!r}", f"Use one of {', '.join(map(repr, known))}.")
        feedback = self.feedback_decay
        _check(feedback is None or 0.0 < feedback <= 1.0, f"error_feedback={feedback!r}", "Use a decay from 0 to 1.")
        _check(
            feedback is None or self.residual_dtype is not None,
            "error_feedback needs a place to keep what was left out, and residual_dtype is None",
            "Use residual_dtype='F32' or 'BF16'.",
        )
        _check(type(self.full_every) is int and 1 <= self.full_every <= 1000, "full_every", "Use 1 to 1000.")
        _check(
            self.full_every == 1 or self.commit_codec is not None,
            f"full_every={self.full_every} leaves nothing to publish in between",
            "Give commit_codec, such as 'BF16'.",
        )
        _check(type(self.merge_memory) is int and self.merge_memory >= 0, "merge_memory is negative", "Use bytes.")

    @property
    def feedback_decay(self) -> float | None:
        """What a residual is multiplied by before it is added to the next delta; None without error feedback."""
        if self.error_feedback is None or self.error_feedback is False:
            return None
        return float(self.error_feedback)

    @property
    def keeps_residual(self) -> bool:
        """Whether committed parameters are rounded and what that leaves out is kept with the outer state."""
        rounded = self.master_dtype != "F32" or not codec_named(self.commit_codec or "F32").lossless
        return rounded and self.residual_dtype is not None

    # -- presets -------------------------------------------------------------------------------------------

    @classmethod
    def standard(cls, **settings: object) -> Self:
        """DiLoCo (Douillard et al., arXiv 2311.08105): the whole model, all nodes, a barrier every 500 steps.

        Plain mean of bf16 deltas, Nesterov 0.7 with momentum 0.9. The paper's H of 500 suits 150M parameters and
        more; smaller models want 50 to 100.
        """
        return cls._preset(
            settings, sync_every=500, fragments=1, in_flight=1, overlap_steps=0, follow=False, quorum_size=EVERYONE,
            grace_seconds=0.0, merge=WeightedMean(), outer=Nesterov(lr=0.7, momentum=0.9), delta_codec="BF16",
            alignment=Overwrite(), stale="reject",
        )  # fmt: skip

    @classmethod
    def streaming(cls, **settings: object) -> Self:
        """Streaming DiLoCo (arXiv 2501.18512): strided fragments, up to five steps of overlap, a blend of half.

        H 100 (section 4), fragments of three layers (eight of them at 24 layers), an overlap that costs nothing up to
        five steps, deltas of four bits in E3M0, outer rate 0.4.
        """
        return cls._preset(
            settings, sync_every=100, fragments=8, in_flight=2, overlap_steps=5, follow=False, quorum_size=EVERYONE,
            grace_seconds=0.0, alignment=Blend(0.5), merge=WeightedMean(), outer=Nesterov(lr=0.4, momentum=0.9),
            partition=Strided(), delta_codec="F4_E3M0", stale="reject",
        )  # fmt: skip

    @classmethod
    def decoupled(cls, **settings: object) -> Self:
        """Decoupled DiLoCo (arXiv 2604.21428); ``DiLoCo()`` is the same, but carries steps over a commit.

        Two snapshots in flight, a quorum of one with adaptive grace, radial-directional averaging with the plain
        mean for embeddings, fragments balanced by bytes, overwrite. The paper has 24 fragments in 24 steps and does
        not print its outer rate; here it is four in 100, and the 0.7 and 0.9 of DiLoCo.
        """
        return cls._preset(settings, alignment=Overwrite(), stale="reject")

    @classmethod
    def eager(cls, **settings: object) -> Self:
        """Eager updates (arXiv 2502.12996): one whole round of overlap, bridged by each node's own guess of the commit.

        H 30, the whole model (better there than fragments), four-bit deltas, outer rate 0.4 as in Streaming DiLoCo.
        An eager node also downloads the outer optimizer's state with each commit.
        """
        return cls._preset(
            settings, sync_every=30, fragments=1, in_flight=1, overlap_steps=30, follow=False, quorum_size=EVERYONE,
            grace_seconds=0.0, alignment=Eager(), merge=WeightedMean(), outer=Nesterov(lr=0.4, momentum=0.9),
            delta_codec="F4_E3M0", stale="reject",
        )  # fmt: skip

    @classmethod
    def sparse(cls, **settings: object) -> Self:
        """SparseLoCo (arXiv 2508.15706): 64 of 4096 values with two bits each, error feedback of 0.95, no momentum.

        H 30, a barrier, norms clipped to the round's median, outer SGD with rate 1. Uploads are 146 times smaller
        than fp32.
        """
        return cls._preset(
            settings, sync_every=30, fragments=1, in_flight=1, overlap_steps=0, follow=False, quorum_size=EVERYONE,
            grace_seconds=0.0, merge=WeightedMean(clip=1.0), outer=SGD(lr=1.0), delta_codec="TOPK(64/4096,INT2)",
            error_feedback=0.95, alignment=Overwrite(), stale="reject",
        )  # fmt: skip

    @classmethod
    def local_sgd(cls, **settings: object) -> Self:
        """Local SGD (Stich, arXiv 1805.09767), or FedAvg with all clients: average the models every 100 steps.

        In the study of outer optimizers (``docs/performance.md``) averaging mostly ended above the default at this H,
        and below it where two or four nodes averaged every 20 steps for 3000.
        """
        return cls._preset(
            settings, sync_every=100, fragments=1, in_flight=1, overlap_steps=0, follow=False, quorum_size=EVERYONE,
            grace_seconds=0.0, merge=WeightedMean(), outer=SGD(lr=1.0), delta_codec="F32", alignment=Overwrite(),
            stale="reject",
        )  # fmt: skip

    @classmethod
    def solo(cls, **settings: object) -> Self:
        """One node: Nesterov on its own displacement every 32 steps (SNOO, arXiv 2510.15830; Lookahead's relative).

        The paper uses K of 16 to 64 with 0.7 and 0.9. Nothing is lost when others join.
        """
        return cls._preset(
            settings, sync_every=32, fragments=1, in_flight=1, overlap_steps=0, follow=False, quorum_size=1,
            outer=Nesterov(lr=0.7, momentum=0.9), delta_codec="F32", alignment=Overwrite(), stale="reject",
        )  # fmt: skip

    @classmethod
    def _preset(cls, given: Mapping[str, object], **values: object) -> Self:
        """The preset's ``values``, replaced by what was ``given`` under any of its names."""
        replaced = {_ALIASED.get(name, name) for name in given}
        made = {name: value for name, value in values.items() if name not in replaced} | dict(given)
        return cls(**made)  # type: ignore[arg-type]  # checked where it is made

    # -- the manifest --------------------------------------------------------------------------------------

    def shared_settings(self) -> dict[str, object]:
        """What the manifest holds: plain JSON, equal on every node of a run."""
        return {
            "name": "diloco",
            "sync_every": self.sync_every,
            "fragments": self.fragments,
            "quorum_size": self.quorum_size,
            "grace_seconds": self.grace_seconds,
            "outer": outer_settings(self.outer),
            "merge": merge_settings(self.merge),
            "partition": partition_settings(self.partition),
            "delta_codec": codec_named(self.delta_codec).name,
            "commit_codec": None if self.commit_codec is None else codec_named(self.commit_codec).name,
            "full_every": self.full_every,
            "master_dtype": self.master_dtype,
            "momentum_dtype": self.momentum_dtype,
            "residual_dtype": self.residual_dtype,
            "tokens_per_step_max": self.tokens_per_step_max,
            "global_batch_size": self.global_batch_size,
            "share": self.share,
            "joiner_ramp": self.joiner_ramp,
        }


def diloco_from(shared: Mapping[str, object]) -> DiLoCo:
    """The settings that a manifest holds; a node's own are at their defaults.

    Raises :class:`ConfigurationError` if they are not those of a run of this kind.
    """
    known = {setting.name for setting in fields(DiLoCo)} - OWN
    given = {name: value for name, value in shared.items() if name != "name"}
    if shared.get("name") != "diloco" or given.keys() != known:
        raise ConfigurationError("The run's settings are not DiLoCo's.", "Use the version that created the run.")
    parsers = {"outer": outer_from, "merge": merge_from, "partition": partition_from}
    try:
        made = {
            name: parsers[name](value) if name in parsers else value  # type: ignore[arg-type]  # each checks what it gets
            for name, value in given.items()
        }
        return DiLoCo(**made)  # type: ignore[arg-type]  # checked where it is made
    except (TypeError, ValueError, AttributeError) as problem:
        raise ConfigurationError(f"The run's settings do not fit: {problem}", "Start a new run.") from problem


def settings_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """One line for each setting that differs, ours against the run's."""
    return [
        f"{name}: {_shown(ours, name)} here, {_shown(theirs, name)} in the run"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name) or (name in ours) != (name in theirs)
    ]


def _shown(settings: Mapping[str, object], name: str) -> str:
    return repr(settings[name])[:SHOWN_CHARACTERS] if name in settings else "nothing"


def _with(outer: Outer, name: str, value: float) -> Outer:
    """The outer optimizer with one of its settings changed."""
    _check(hasattr(outer, name), f"{type(outer).__name__} has no {name}", f"Give outer= an optimizer that has {name}.")
    return replace(outer, **{name: value})  # type: ignore[type-var]  # every outer optimizer is a dataclass


def _check(holds: bool, cause: str, remedy: str) -> None:
    if not holds:
        raise ConfigurationError(f"DiLoCo: {cause}.", remedy)
