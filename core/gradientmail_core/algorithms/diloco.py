"""DiLoCo and its streaming and decoupled forms, as one set of settings.

Learners train on their own; every ``sync_every`` steps each fragment of the model is merged across
them and moved by an outer optimizer (DiLoCo, arXiv 2311.08105; fragments and overlap, Streaming DiLoCo,
2501.18512; quorum, grace and radial-directional averaging, Decoupled DiLoCo, 2604.21428).

Settings that decide what is committed are the run's: they stand in its manifest and every node must
have the same. The others (``in_flight``, ``overlap_steps``) are each node's own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradientmail_core.algorithms.merge import Merge, Rda, merge_settings
from gradientmail_core.algorithms.outer import Nesterov, Outer, outer_settings
from gradientmail_core.algorithms.partition import ByBytes, Partition, partition_settings
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codecs import codec_named

SHOWN_CHARACTERS = 200


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
      about to close without this node.
    * ``delta_codec``: wire format of the deltas; committed parameters travel as fp32.
    * ``tokens_per_step_max``: a bound on what one optimizer step of one node may claim, in samples or tokens.
    * ``global_batch_size``: the batch the live nodes share; None leaves batches alone.
    """

    sync_every: int = 100
    fragments: int = 4
    in_flight: int = 2
    overlap_steps: int | None = None
    follow: bool | None = None
    quorum_size: int = 1
    grace_seconds: float | None = None
    outer: Outer = field(default_factory=Nesterov)
    merge: Merge = field(default_factory=Rda)
    partition: Partition = field(default_factory=ByBytes)
    delta_codec: str = "BF16"
    tokens_per_step_max: int = 2**24
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
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
            self.follow is None or self.follow is False,
            f"follow={self.follow!r}",
            "Use None (adaptive) or False (at the due step).",
        )
        _check(self.tokens_per_step_max >= 1, "tokens_per_step_max is below 1", "Use the largest honest batch.")
        _check(
            self.global_batch_size is None or self.global_batch_size >= 1,
            "global_batch_size is below 1",
            "Use the batch all nodes share, or None.",
        )
        codec_named(self.delta_codec)

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
            "tokens_per_step_max": self.tokens_per_step_max,
            "global_batch_size": self.global_batch_size,
        }


def settings_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """One line for each setting that differs, ours against the run's."""
    return [
        f"{name}: {_shown(ours, name)} here, {_shown(theirs, name)} in the run"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name) or (name in ours) != (name in theirs)
    ]


def _shown(settings: Mapping[str, object], name: str) -> str:
    return repr(settings[name])[:SHOWN_CHARACTERS] if name in settings else "nothing"


def _check(holds: bool, cause: str, remedy: str) -> None:
    if not holds:
        raise ConfigurationError(f"DiLoCo: {cause}.", remedy)
