"""Going on where a checkpoint was taken: the counters of a node, as plain JSON, and what becomes of them at a join.

A trainer's checkpoint holds the parameters, the inner optimizer and the data position; what it lacks is how far
each fragment had come since the commit it was trained from. That commit is named by the digest of its record, and
its parameters, the *anchor* of the next delta, are fetched again by that digest: a restored node can then only
subtract from what was really committed. A fragment whose chain moved on meanwhile starts from its newest commit.

A snapshot that was outstanding at the checkpoint is not. If it was merged since, the chain has moved on and its
steps are not claimed again; if not, the next one takes its place under the same key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.learner import LearnerState, Track
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.fields import HEX, SHA256, Fields, Rejected, guarded

FRAGMENTS_MOST = 1000
VERSION = 1


@dataclass(frozen=True, slots=True)
class Saved:
    """A node's counters at a checkpoint, and the run they are of."""

    run: str
    state: LearnerState


def saved_json(run: str, state: LearnerState) -> dict[str, object]:
    """The checkpoint as plain JSON, small whatever the model's size."""
    return {
        "version": VERSION,
        "run": run,
        "local_step": state.local_step,
        "tokens": state.tokens,
        "lead": state.lead,
        "poisoned": state.poisoned,
        "tracks": [
            {
                "version": track.version,
                "record": track.record,
                "due": track.due,
                "step_then": track.step_then,
                "tokens_then": track.tokens_then,
            }
            for track in state.tracks
        ],
    }


def parse_saved(state: Mapping[str, object]) -> Saved:
    """The checkpoint in ``state``. Raises :class:`ConfigurationError` if it is none."""

    def parse() -> Saved:
        fields = Fields(dict(state))
        fields.count("version", VERSION)
        return Saved(
            fields.text("run", HEX),
            LearnerState(
                tracks=tuple(_track(track) for track in fields.objects("tracks", FRAGMENTS_MOST)),
                local_step=fields.count("local_step"),
                tokens=fields.count("tokens"),
                lead=fields.count("lead"),
                poisoned=fields.count("poisoned"),
            ),
        )

    saved = guarded(parse)
    if isinstance(saved, Rejected):
        raise ConfigurationError(
            f"This is no state of a session: {saved.reason}.", "Give what state_dict() returned, unchanged."
        )
    return saved


def _track(fields: Fields) -> Track:
    return Track(
        version=fields.count("version"),
        record=fields.text("record", SHA256),
        due=fields.count("due"),
        step_then=fields.count("step_then"),
        tokens_then=fields.count("tokens_then"),
    )


def resumed(state: LearnerState, heads: Sequence[Head]) -> LearnerState:
    """The state of a node that continues ``state`` from ``heads``, its run's newest commits.

    A fragment whose head is still the one it was trained from keeps its counters; the others start anew.
    """
    tracks = tuple(
        track
        if track.record == head.digest
        else Track(head.version, head.digest, head.due, state.local_step, state.tokens)
        for track, head in zip(state.tracks, heads, strict=True)
    )
    lead = max(state.lead, *(head.newest_step - state.local_step for head in heads))
    return LearnerState(tracks, state.local_step, state.tokens, lead, state.poisoned)


def kept(state: LearnerState, heads: Sequence[Head]) -> frozenset[int]:
    """Fragments that keep what was trained since their commit."""
    return frozenset(
        head.fragment for track, head in zip(state.tracks, heads, strict=True) if track.record == head.digest
    )
