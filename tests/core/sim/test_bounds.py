"""What a run may leave lying about, and what it may ask for."""

from dataclasses import replace

import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.protocol.keys import ClaimKey, DeltaKey, HeadKey, LeaseKey, blob_key
from gradientmail_core.sim.bounds import Found, Stretch, allowed, crowded, overspent
from gradientmail_core.sim.store import Traffic

AGED = 30.0
CALM = Found(
    ages={
        **{LeaseKey("a", beat, "t", beat, "0" * 16).path: AGED for beat in (8, 9)},
        HeadKey(0, 6).path: AGED,
        DeltaKey(12, "a").path: AGED,
        **{blob_key(round, "a", f"{round:064x}"): AGED for round in range(12)},
    },
    settings=DiLoCo(sync_every=4, fragments=2),
    living=("a",),
    lives=1,
    closed=dict.fromkeys(range(2, 13), AGED),
)


def test_a_run_in_order_is_clean() -> None:
    assert list(crowded(CALM)) == []


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ([DeltaKey(8, "a").path], "of a closed round"),
        ([ClaimKey(6, 0).path], "of a closed round"),
        ([LeaseKey("a", 3, "t", 1, "0" * 16).path], "old beats of a"),
        ([HeadKey(0, round).path for round in range(2, 18, 2)], "hints"),
        ([blob_key(2 * round, "a", f"{round:064x}") for round in range(6, 40)], "payloads of fragment 0"),
    ],
)
def test_what_nobody_removed_is_seen_once_it_is_old(keys: list[str], what: str) -> None:
    (violation,) = crowded(replace(CALM, ages={**CALM.ages, **dict.fromkeys(keys, AGED)}))
    assert what in violation
    if "round" in what or "beats" in what:
        assert list(crowded(replace(CALM, ages={**CALM.ages, **dict.fromkeys(keys, 1.0)}))) == []


def test_snapshots_of_rounds_that_have_just_closed_and_beats_of_the_dead_may_stay() -> None:
    fresh = replace(CALM, ages={**CALM.ages, DeltaKey(8, "a").path: AGED}, closed={8: 1.0})
    assert list(crowded(fresh)) == []
    for_one_of_the_living_to_sweep = replace(fresh, closed={8: AGED, 10: AGED, 12: 1.0})
    assert list(crowded(for_one_of_the_living_to_sweep)) == []
    dead = {LeaseKey("b", beat, "t", 1, "0" * 16).path: AGED for beat in range(5)}
    assert list(crowded(replace(CALM, ages={**CALM.ages, **dead}))) == []


def test_payloads_kept_for_who_joins_may_stay_as_many_as_rounds_closed_meanwhile() -> None:
    four_each = [blob_key(2 * round, "a", f"{part}{round:063x}") for round in range(1, 9) for part in range(4)]
    crowd = replace(CALM, ages=dict.fromkeys(four_each, AGED))
    (violation,) = crowded(crowd)
    assert "32 payloads of fragment 0" in violation
    assert list(crowded(replace(crowd, pinned={0: 3}))) == []
    assert len(list(crowded(replace(crowd, pinned={0: 2})))) == 1
    assert len(list(crowded(replace(crowd, pinned={1: 3})))) == 1


def test_the_budget_grows_with_time_rounds_and_nodes_and_with_nothing_else() -> None:
    stretch = Stretch(seconds=20.0, period=1.0, nodes=3, rounds=8, fragments=2)
    may = allowed(stretch)
    assert list(overspent(may, may)) == []
    (violation,) = overspent(may + Traffic(gets=1), may)
    assert "gets in the calm" in violation
    for more in (replace(stretch, seconds=40.0), replace(stretch, rounds=16), replace(stretch, nodes=6)):
        assert all(getattr(allowed(more), kind) >= getattr(may, kind) for kind in ("gets", "puts", "lists"))
        assert allowed(more).puts > may.puts
    standing = allowed(replace(stretch, standing=True))
    assert standing.gets > may.gets and (standing.puts, standing.lists) == (may.puts, may.lists)
