"""Going on where a checkpoint was taken: the counters of a node, as plain JSON, and what becomes of them at a join.

A trainer's checkpoint holds the parameters, the inner optimizer and the data position; what it lacks is how far
each fragment had come since the commit it was trained from. That commit is named by the digest of its record, and
its parameters, the *anchor* of the next delta, are fetched again by that digest: a restored node can then only
subtract from what was really committed. A fragment whose chain moved on meanwhile starts from its newest commit.

A snapshot that was outstanding at the checkpoint is not. If it was merged since, the chain has moved on and its
steps are not claimed again; if not, the next one takes its place under the same key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gradientmail_core.algorithms.alignment import Mode
from gradientmail_core.engine.aligning import Memory
from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.learner import LearnerState, Track, standing
from gradientmail_core.engine.ledger import RESTARTED, accounts_json, booked, parse_account
from gradientmail_core.engine.ledger import decided as decided_tokens
from gradientmail_core.engine.residuals import LeftOver, left_over_json, parse_left_over
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.exchange import Decided, read_roll, read_round
from gradientmail_core.protocol.fields import HEX, SHA256, FieldRefused, Fields, Rejected, guarded
from gradientmail_core.protocol.records import RoundRecord

FRAGMENTS_MOST = 1000
NOTHING: Mapping[int, int] = MappingProxyType({})
VERSION = 1


@dataclass(frozen=True, slots=True)
class Saved:
    """A node's counters at a checkpoint, the run they are of, and for each fragment what alignment and codec keep."""

    run: str
    state: LearnerState
    memories: tuple[Memory, ...]
    residuals: tuple[LeftOver | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Continued:
    """What a node that joins goes on with: nothing, or a checkpoint's counters on top of the newest commits.

    ``kept`` are the fragments that keep what was trained since their commit.
    """

    state: LearnerState | None = None
    kept: frozenset[int] = frozenset()
    memories: tuple[Memory, ...] = ()
    residuals: tuple[LeftOver | None, ...] = ()


def continued(saved: Saved, heads: Sequence[Head], counted: Mapping[int, int]) -> Continued:
    """How a node goes on from ``saved``; for ``counted`` see :func:`resumed`."""
    state = resumed(saved.state, heads, counted)
    return Continued(state, kept(saved.state, heads), saved.memories, saved.residuals)


def saved_json(
    run: str, state: LearnerState, memories: Sequence[Memory], residuals: Sequence[LeftOver | None]
) -> dict[str, object]:
    """The checkpoint as plain JSON: small whatever the model's size, but for residuals of error feedback."""
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
        "books": accounts_json(state.books),
        "alignments": [
            {"carrying": memory.mode.carrying, "streak": memory.mode.streak, "rebased": memory.rebased}
            for memory in memories
        ],
        "residuals": [left_over_json(residual) for residual in residuals],
    }


def parse_saved(state: Mapping[str, object]) -> Saved:
    """The checkpoint in ``state``. Raises :class:`ConfigurationError` if it is none."""

    def parse() -> Saved:
        fields = Fields(dict(state))
        fields.count("version", VERSION)
        tracks = tuple(_track(track) for track in fields.objects("tracks", FRAGMENTS_MOST))
        books = tuple(parse_account(account) for account in fields.objects("books", FRAGMENTS_MOST))
        memories = tuple(_memory(memory) for memory in fields.objects("alignments", FRAGMENTS_MOST))
        residuals = tuple(parse_left_over(residual) for residual in fields.items("residuals", FRAGMENTS_MOST))
        if not len(books) == len(memories) == len(residuals) == len(tracks):
            raise FieldRefused("accounts, alignments or residuals are not one for each fragment")
        return Saved(
            fields.text("run", HEX),
            LearnerState(
                tracks=tracks,
                local_step=fields.count("local_step"),
                tokens=fields.count("tokens"),
                lead=fields.count("lead"),
                poisoned=fields.count("poisoned"),
                books=books,
            ),
            memories,
            residuals,
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


def _memory(fields: Fields) -> Memory:
    return Memory(Mode(fields.flag("carrying"), fields.count("streak")), fields.count("rebased"))


def resumed(state: LearnerState, heads: Sequence[Head], counted: Mapping[int, int] = NOTHING) -> LearnerState:
    """The state of a node that continues ``state`` from ``heads``, its run's newest commits.

    A fragment whose head is still the one it was trained from keeps its counters; the others start anew. ``counted``
    gives, by fragment, the tokens that the next round after the checkpoint counts for this node.
    """
    tracks, books = list(state.tracks), list(state.books)
    for number, head in enumerate(heads):
        stood = standing(state, number)
        if tracks[number].record == head.digest:
            tracks[number] = replace(tracks[number], outstanding=None, inherited=stood.in_flight + stood.carried)
            continue
        known = counted.get(number)
        merged, dropped = decided_tokens(stood, merged=known is not None, counted=known, kept=0, cause=RESTARTED)
        books[number] = booked(books[number], merged, dropped)
        tracks[number] = Track(head.version, head.digest, head.due, state.local_step, state.tokens)
    lead = max(state.lead, *(head.newest_step - state.local_step for head in heads))
    return replace(state, tracks=tuple(tracks), lead=lead, books=tuple(books))


def kept(state: LearnerState, heads: Sequence[Head]) -> frozenset[int]:
    """Fragments that keep what was trained since their commit."""
    return frozenset(
        head.fragment for track, head in zip(state.tracks, heads, strict=True) if track.record == head.digest
    )


async def counted(host: Host, run: Run, state: LearnerState, heads: Sequence[Head]) -> dict[int, int]:
    """By fragment that moved on since the checkpoint: this node's tokens in the round after the checkpoint's commit.

    One request a fragment. A record that is not found, or does not name this node, is left out.
    """
    found: dict[int, int] = {}
    for track, head in zip(state.tracks, heads, strict=True):
        if track.record != head.digest:
            round = (track.version + 1) * run.fragments + head.fragment
            decided = await read_round(host.mailbox, run.id, round)
            record = await read_roll(host.mailbox, decided.record) if isinstance(decided, Decided) else decided
            mine = record.participants if isinstance(record, RoundRecord) else ()
            found.update((head.fragment, who.tokens) for who in mine if who.node == host.node)
    return found
