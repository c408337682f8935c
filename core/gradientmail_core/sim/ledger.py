"""What became of every snapshot that a trainer took: in one record, counted as it was trained, or reported lost.

A snapshot claims the steps since its fragment was last aligned. Claims of one life on one fragment must not overlap
where they were merged: that would count steps twice. A merged claim must be the one that was made, and what was not
merged must have been told to its node.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from gradientmail_core.protocol.records import Participant, RoundRecord


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a node."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Claim:
    """What a snapshot claims: its last step, how many steps, how many tokens."""

    last: int
    steps: int
    tokens: int


Claims: TypeAlias = Mapping[tuple[Life, int], Claim]
"""Claims by life and round."""


def miscounted(records: Sequence[RoundRecord], claims: Claims, fragments: int) -> Iterator[str]:
    """Snapshots merged twice, or otherwise than they were taken; steps that two merged snapshots claim; false sums."""
    merged = [participant.snapshot for record in records for participant in record.participants]
    for snapshot, times in Counter(merged).items():
        if times > 1:
            yield f"snapshot {snapshot[:8]} was merged {times} times"
    tokens: Counter[int] = Counter()
    for record in records:
        total = sum(participant.weight for participant in record.participants)
        if record.participants and not np.isclose(total, 1.0):
            yield f"the weights of round {record.round} add up to {total}"
        tokens[record.round % fragments] += sum(participant.tokens for participant in record.participants)
        if record.merged_tokens != tokens[record.round % fragments]:
            yield f"round {record.round} counts {record.merged_tokens} tokens of {tokens[record.round % fragments]}"
        for participant in record.participants:
            yield from _unlike(record, participant, claims.get((life_of(participant), record.round)))
    yield from _claimed_twice(records, claims, fragments)


def life_of(participant: Participant) -> Life:
    """The process whose snapshot was merged."""
    return Life(participant.node, participant.incarnation)


def _unlike(record: RoundRecord, participant: Participant, claim: Claim | None) -> Iterator[str]:
    who = f"{participant.node}'s snapshot in round {record.round}"
    if participant.steps == 0:
        yield f"{who} has no trained step"
    if claim is None:
        yield f"{who} was never taken"
    elif (claim.steps, claim.tokens) != (participant.steps, participant.tokens):
        yield f"{who} counts {participant.steps} steps and {participant.tokens} tokens and claims {claim}"


def _claimed_twice(records: Sequence[RoundRecord], claims: Claims, fragments: int) -> Iterator[str]:
    merged: dict[tuple[Life, int], list[Claim]] = {}
    for record in records:
        for participant in record.participants:
            life = life_of(participant)
            if (claim := claims.get((life, record.round))) is not None:
                merged.setdefault((life, record.round % fragments), []).append(claim)
    for (life, fragment), counted in merged.items():
        for before, after in pairwise(sorted(counted, key=lambda claim: claim.last)):
            if after.last - after.steps < before.last:
                yield f"{life.node}'s steps to {before.last} of fragment {fragment} were merged twice"


def unreported(life: Life, claims: Claims, records: Sequence[RoundRecord], told: Collection[int]) -> Iterator[str]:
    """Rounds that closed without a snapshot of this life, of which it never heard; and merged ones it took for lost."""
    taken = {round for owner, round in claims if owner == life}
    merged = {
        record.round for record in records if life in {life_of(participant) for participant in record.participants}
    }
    closed = {record.round for record in records}
    for round in sorted((taken & closed) - merged - set(told)):
        yield f"{life.node} never heard that its snapshot of round {round} was not merged"
    for round in sorted(merged & set(told)):
        yield f"{life.node} was told that its snapshot of round {round} was lost, and it is merged"
