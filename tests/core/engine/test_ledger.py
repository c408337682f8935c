"""The ledger: every token in exactly one place, whatever becomes of a snapshot, and the causes by name."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientmail_core.engine.ledger import (
    Account,
    Books,
    Ledger,
    Standing,
    Tally,
    accounts_json,
    booked,
    decided,
    parse_account,
    tallied,
)
from gradientmail_core.protocol.fields import FieldRefused, Fields
from gradientmail_core.protocol.records import Refusal
from tests.core.engine.parts import first_head, record_after, run_of

FLOWN = Standing(in_flight=100, carried=20)


@pytest.mark.parametrize(
    ("standing", "fate", "expected"),
    [
        (FLOWN, {"merged": True}, (100, (("overlap", 20),))),
        (FLOWN, {"merged": True, "kept": 20}, (100, ())),
        (FLOWN, {"merged": True, "counted": 90, "kept": 20}, (90, (("clamped", 10),))),
        (FLOWN, {"merged": False}, (0, (("late", 100), ("overlap", 20)))),
        (FLOWN, {"merged": False, "cause": "stale"}, (0, (("stale", 100), ("overlap", 20)))),
        (FLOWN, {"merged": False, "kept": 120}, (0, ())),
        (FLOWN, {"merged": False, "cause": "outlier", "kept": 20}, (0, (("outlier", 100),))),
        (Standing(0, 30), {"merged": False}, (0, (("unpublished", 30),))),
        (Standing(0, 30), {"merged": False, "kept": 30}, (0, ())),
        (Standing(0, 30), {"merged": True, "counted": 25, "cause": "restarted"}, (25, (("restarted", 5),))),
        (Standing(), {"merged": False}, (0, ())),
    ],
)
def test_a_decision_puts_every_token_somewhere(standing: Standing, fate: dict[str, Any], expected: Any) -> None:
    assert decided(standing, **{"counted": None, "kept": 0, "cause": None, **fate}) == expected


@given(
    in_flight=st.integers(0, 10**6),
    carried=st.integers(0, 10**6),
    merged=st.booleans(),
    counted=st.none() | st.integers(0, 3 * 10**6),
    keeps=st.sampled_from(["nothing", "since", "all"]),
    cause=st.sampled_from([None, "stale", "restarted"]),
)
def test_no_token_is_lost_or_made(
    in_flight: int, carried: int, merged: bool, counted: int | None, keeps: str, cause: str | None
) -> None:
    kept = {"nothing": 0, "since": carried, "all": 0 if merged else in_flight + carried}[keeps]
    taken, dropped = decided(Standing(in_flight, carried), merged=merged, counted=counted, kept=kept, cause=cause)
    assert taken >= 0 and all(tokens > 0 for _, tokens in dropped)
    assert taken + kept + sum(tokens for _, tokens in dropped) == in_flight + carried


def test_accounts_add_up_by_cause_and_survive_json() -> None:
    account = booked(booked(Account(), 100, [("late", 5)]), 50, [("late", 2), ("overlap", 1)])
    assert account == Account(150, (("late", 7), ("overlap", 1)))
    assert account.dropped_tokens == 8
    assert [parse_account(Fields(raw)) for raw in accounts_json([account])] == [account]


@pytest.mark.parametrize("raw", [{}, {"merged": -1, "dropped": {}}, {"merged": 1, "dropped": {"late": "7"}}])
def test_a_forged_account_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(FieldRefused):
        parse_account(Fields(raw))


def test_a_tally_counts_what_records_say_of_everybody() -> None:
    run = run_of()
    refusal = Refusal("c", "", "", "nonfinite")
    record = record_after(first_head(run), run, nodes=("a", "b"), refusals=(refusal, replace(refusal, node="d")))
    tally = tallied(tallied(Tally(), record), record)
    assert tally.merged == {"a": 320, "b": 320}
    assert tally.refused == {("c", "nonfinite"): 2, ("d", "nonfinite"): 2}


def test_a_ledger_gives_means_over_fragments_and_says_whether_it_balances() -> None:
    one = Books(processed=200, merged=100, in_flight=50, carried=20, dropped={"late": 30})
    two = Books(processed=200, merged=160, in_flight=0, carried=40, dropped={})
    ledger = Ledger("a", (one, two))
    assert (ledger.processed, ledger.merged, ledger.in_flight, ledger.carried) == (200, 130, 25, 30)
    assert ledger.dropped == {"late": 15} and ledger.balanced
    assert not Ledger("a", (one, replace(two, carried=39))).balanced
    assert str(ledger) == "a: 200 tokens processed, 130 merged, 25 in flight, 30 carried; dropped: 15 late"
    assert str(Ledger("a", ())).endswith("dropped: none")
