"""What is merged is what was trained, once; and who published hears what became of it."""

from dataclasses import replace

import pytest

from gradientmail_core.protocol.records import Participant, RoundRecord
from gradientmail_core.sim.ledger import Claim, Life, life_of, miscounted, unreported
from tests.core.protocol.records import ROUND

ONE, OTHER = Life("a", "1" * 16), Life("b", "2" * 16)


def record(version: int, *merged: tuple[Life, int, int], total: int) -> RoundRecord:
    """The record of a version of the one fragment: who was merged with how many steps and tokens."""
    participants = tuple(
        Participant(life.node, life.incarnation, f"{version:032x}{number:032x}", steps, tokens, 1 / len(merged))
        for number, (life, steps, tokens) in enumerate(merged)
    )
    return replace(ROUND, round=version, participants=participants, merged_tokens=total)


RECORDS = [record(1, (ONE, 4, 40), (OTHER, 2, 20), total=60), record(2, (ONE, 3, 30), total=90)]
CLAIMS = {(ONE, 1): Claim(4, 4, 40), (OTHER, 1): Claim(2, 2, 20), (ONE, 2): Claim(8, 3, 30)}


def test_a_sound_tape_is_clean() -> None:
    assert life_of(RECORDS[0].participants[0]) == ONE
    assert list(miscounted(RECORDS, CLAIMS, 1)) == []
    assert list(unreported(ONE, CLAIMS, RECORDS, ())) == []


@pytest.mark.parametrize(
    ("claims", "what"),
    [
        ({**CLAIMS, (ONE, 2): Claim(6, 3, 30)}, "merged twice"),
        ({**CLAIMS, (ONE, 2): Claim(8, 4, 30)}, "counts 3 steps"),
        ({**CLAIMS, (ONE, 2): Claim(8, 3, 31)}, "30 tokens and claims"),
        ({(ONE, 1): Claim(4, 4, 40), (ONE, 2): Claim(8, 3, 30)}, "never taken"),
    ],
)
def test_steps_and_tokens_count_once_and_as_they_were_trained(claims: dict[tuple[Life, int], Claim], what: str) -> None:
    (violation,) = miscounted(RECORDS, claims, 1)
    assert what in violation


def test_sums_and_weights_are_checked() -> None:
    wrong = [replace(RECORDS[0], merged_tokens=59), RECORDS[1]]
    assert [violation for violation in miscounted(wrong, CLAIMS, 1) if "59 tokens of 60" in violation]
    heavy = [replace(RECORDS[0], participants=RECORDS[0].participants[:1], merged_tokens=40)]
    assert [violation for violation in miscounted(heavy, CLAIMS, 1) if "add up to 0.5" in violation]
    again = [RECORDS[0], replace(RECORDS[1], participants=RECORDS[0].participants[:1], merged_tokens=100)]
    assert [violation for violation in miscounted(again, CLAIMS, 1) if "merged 2 times" in violation]


def test_a_loss_is_reported_and_nothing_else_is() -> None:
    lost = {**CLAIMS, (OTHER, 2): Claim(6, 2, 20)}
    assert ["round 2" in violation for violation in unreported(OTHER, lost, RECORDS, ())] == [True]
    assert list(unreported(OTHER, lost, RECORDS, (2,))) == []
    assert ["is merged" in violation for violation in unreported(ONE, CLAIMS, RECORDS, (1,))] == [True]
    still_open = {**CLAIMS, (OTHER, 3): Claim(6, 2, 20)}
    assert list(unreported(OTHER, still_open, RECORDS, ())) == []
