"""The learner's counters, what it copies out and what it writes in: a base is what was aligned, not what arrived."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.algorithms.alignment import Carry
from gradientmail_core.algorithms.schedule import is_due
from gradientmail_core.engine.aligning import Policy
from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.learner import (
    NEVER,
    POISONED_MOST,
    WARMUP_STEPS,
    Commit,
    Learner,
    LearnerState,
    Outstanding,
    Overdue,
    Snapshot,
    Wanted,
    aligned,
    blocked,
    due,
    is_poison,
    judged,
    merged_tokens,
    next_due,
    overdue,
    published,
    started,
    stepped,
)
from gradientmail_core.protocol.records import Reason, digest
from gradientmail_core.sim.world import ToyModel
from gradientmail_core.tensors.model import Flat
from tests.core.engine.parts import SETTINGS, first_head, record_after, run_of

RUN = run_of()
FOUR = run_of(replace(SETTINGS, fragments=4))
FIRST_DUE = {0: 10, 1: 20}


def begun(run: Any = RUN, **changes: Any) -> LearnerState:
    return started([first_head(run, fragment, **changes) for fragment in range(run.fragments)])


def at(step: int, state: LearnerState | None = None, tokens: int = 8) -> LearnerState:
    """The state after so many steps in all."""
    state = begun() if state is None else state
    while state.local_step < step:
        state = stepped(state, tokens)
    return state


def committed(state: LearnerState, fragment: int, run: Any = RUN, **changes: Any) -> Head:
    """The next head of a fragment, as if everybody had been in time."""
    before = first_head(run, fragment, version=state.tracks[fragment].version, due=state.tracks[fragment].due)
    record = record_after(before, run)
    fields = {"version": before.version + 1, "step": record.step, "due": record.next_step, "newest_step": record.step}
    return replace(before, digest=digest(record.encoded()), record=record, **{**fields, **changes})


# -- the state ---------------------------------------------------------------------------------------------


def test_fragments_are_due_on_the_grid_once_trained() -> None:
    assert [step for step in range(25) if due(at(step), 4)] == list(range(10, 25))
    assert due(at(9), 4) == ()
    assert due(at(10), 4) == (0,)
    assert due(at(20), 4) == (0, 1)


def test_the_longest_due_comes_first_and_in_flight_bounds_all() -> None:
    state = at(40, begun(FOUR))
    assert due(state, 1) == (0,)
    assert due(state, 3) == (0, 1, 2)
    state = published(published(state, 0), 2)
    assert due(state, 3) == (1,)
    assert due(state, 2) == due(state, 1) == ()


def test_a_fragment_is_published_once_at_a_time() -> None:
    state = published(at(10), 0)
    assert due(at(15, state), 4) == ()
    assert due(at(20, state), 4) == (1,)


def test_an_overdue_round_frees_its_slot_and_not_its_fragment() -> None:
    state = published(at(40, begun(FOUR)), 0)
    assert due(state, 1) == ()
    state = overdue(state, 0)
    assert due(state, 1) == (1,)
    assert 0 not in due(state, 4)
    assert state.tracks[0].outstanding == Outstanding(40, 320, overdue=True, claimed=320)


def test_overdue_without_a_snapshot_means_nothing() -> None:
    assert overdue(at(5), 0) == at(5)


def test_poison_adds_up_until_a_snapshot_is_merged() -> None:
    state = begun()
    for expected, merged, refusal in (
        (1, False, "nonfinite"),
        (1, False, "stale"),
        (1, False, None),
        (2, False, "outlier"),
        (0, True, None),
        (1, False, "outlier"),
    ):
        state = judged(state, merged, refusal)
        assert state.poisoned == expected
    assert [reason for reason in get_args(Reason) if is_poison(reason)] == ["nonfinite", "outlier"]


def test_nothing_is_published_untrained() -> None:
    late = begun(due=0)
    assert due(late, 4) == ()
    assert due(at(1, late), 4) == (0, 1)
    state = aligned(at(10), committed(at(10), 0, due=10))
    assert due(state, 4) == ()
    assert due(stepped(state, 8), 4) == (0,)


def test_early_publishes_what_is_trained_and_within_in_flight() -> None:
    early = frozenset({1})
    assert due(begun(), 4, early) == ()
    assert due(at(3), 4, early) == (1,)
    assert due(at(12), 4, early) == (0, 1)
    assert due(at(12), 1, early) == (0,)
    assert due(published(at(3), 1), 4, early) == ()


@pytest.mark.parametrize(("overlap", "stops"), [(None, None), (0, 10), (1, 11), (5, 15)])
def test_training_stops_overlap_steps_after_a_snapshot(overlap: int | None, stops: int | None) -> None:
    state = published(at(10), 0)
    blocking = [step for step in range(10, 60) if blocked(at(step, state), overlap)]
    assert blocking == ([] if stops is None else list(range(stops, 60)))
    assert not blocked(at(50), overlap)


def test_each_snapshot_counts_its_own_overlap() -> None:
    state = published(at(12, published(at(10), 0)), 1)
    assert blocked(at(15, state), 5)
    state = aligned(at(15, state), committed(state, 0))
    assert not blocked(at(16, state), 5)
    assert blocked(at(17, state), 5)


def test_alignment_starts_the_counters_anew() -> None:
    state = published(at(10), 0)
    head = committed(state, 0)
    state = aligned(at(13, state), head)
    track = state.tracks[0]
    assert (track.version, track.record, track.due, track.outstanding) == (1, head.digest, 30, None)
    assert (track.step_then, track.tokens_then) == (13, 13 * 8)
    assert state.tracks[1] == at(13).tracks[1]


def test_the_round_clock_jumps_forward_and_never_back() -> None:
    state = aligned(at(10), committed(at(10), 0, newest_step=500))
    assert (state.local_step, state.global_step) == (10, 500)
    assert at(15, state).global_step == 505
    assert aligned(at(15, state), committed(state, 1, newest_step=20)).global_step == 505


def test_a_joiner_starts_at_the_newest_step_of_its_records() -> None:
    heads = [first_head(RUN, 0, newest_step=70), first_head(RUN, 1, newest_step=85)]
    assert started(heads).global_step == 85
    assert started(heads).local_step == 0


@given(
    st.lists(st.sampled_from(["step", "publish", "align 0", "align 1", "late 0", "jump 0", "overdue 1"]), max_size=60),
    st.integers(1, 3),
)
@settings(deadline=None)
def test_whatever_happens_the_counters_stay_sound(actions: list[str], in_flight: int) -> None:
    state = begun()
    clock = 0
    for action in actions:
        match action.split():
            case ["step"]:
                state = stepped(state, 8)
            case ["publish"]:
                for fragment in due(state, in_flight):
                    state = published(state, fragment)
            case ["align", number]:
                state = aligned(state, committed(state, int(number)))
            case ["late", number]:
                state = aligned(state, committed(state, int(number), newest_step=0))
            case ["jump", number]:
                state = aligned(state, committed(state, int(number), newest_step=state.global_step + 7))
            case ["overdue", number]:
                state = overdue(state, int(number))
        flying = [track for track in state.tracks if track.outstanding and not track.outstanding.overdue]
        assert len(flying) <= in_flight
        assert state.global_step >= clock
        assert all(state.local_step >= track.step_then for track in state.tracks)
        if due(state, 9):
            assert next_due(state) <= state.local_step
        clock = state.global_step


def test_the_next_due_step_is_known_by_counting() -> None:
    assert next_due(at(3)) == 10
    assert next_due(published(at(10), 0)) == 20
    assert next_due(published(published(at(20), 0), 1)) == NEVER
    jumped = aligned(at(10), committed(at(10), 0, newest_step=18))
    assert next_due(jumped) == 12, "fragment 1 is due at step 20 of a clock that is 8 ahead"


def test_tokens_of_a_round_add_up() -> None:
    assert merged_tokens(record_after(first_head(RUN), RUN, nodes=("a", "b"))) == 320
    assert merged_tokens(None) == 0


# -- the model ---------------------------------------------------------------------------------------------


class Bench:
    """A learner on a toy model, whose snapshots are collected and whose time is set by hand."""

    def __init__(
        self,
        *,
        run: Any = RUN,
        in_flight: int = 2,
        overlap_steps: int | None = None,
        policy: Policy | None = None,
        flush: bool = False,
    ) -> None:
        self.model = ToyModel()
        self.run = run
        self.snapshots: list[Snapshot] = []
        self.applied: list[Commit] = []
        self.now = 0.0
        self.woken = 0
        commits = [self.commit_of(first_head(run, fragment), 1.0) for fragment in range(run.fragments)]
        self.learner = Learner(
            self.model,
            run.layouts,
            commits,
            in_flight=in_flight,
            overlap_steps=overlap_steps,
            policy=policy,
            publish=self.snapshots.append,
            applied=self.applied.append,
            now=lambda: self.now,
            delivered=self.wake,
            flush=flush,
        )

    def wake(self) -> None:
        self.woken += 1

    def commit_of(self, head: Head, fill: float) -> Commit:
        return Commit(head, np.full(self.run.layouts[head.fragment].size, fill, np.float32), merged=True)

    def next_commit(self, fragment: int, fill: float, **changes: Any) -> Commit:
        return self.commit_of(committed(self.learner.state, fragment, self.run, **changes), fill)

    def train(self, steps: int = 1) -> list[bool]:
        """Steps that move every parameter by -0.125, half a second each."""
        changed = []
        for _ in range(steps):
            for values in self.model.values.values():
                values -= 0.125
            self.now += 0.5
            changed.append(self.learner.step(8))
        return changed

    def read(self, fragment: int) -> Flat:
        values = np.empty(self.run.layouts[fragment].size, np.float32)
        self.model.read(self.run.layouts[fragment], values)
        return values


def test_starting_loads_the_committed_parameters() -> None:
    bench = Bench()
    assert all((values == 1.0).all() for values in bench.model.values.values())


def test_a_due_fragment_is_copied_out_with_its_base_and_counters() -> None:
    bench = Bench()
    bench.train(10)
    (snapshot,) = bench.snapshots
    assert (snapshot.fragment, snapshot.version, snapshot.record) == (0, 0, RUN.digest)
    assert (snapshot.steps, snapshot.tokens, snapshot.local_step, snapshot.clock) == (10, 80, 10, 10)
    assert (snapshot.base == 1.0).all() and (snapshot.values == 1.0 - 10 * 0.125).all()
    assert not snapshot.early
    assert snapshot.step_seconds == pytest.approx(0.5)
    bench.train(3)
    assert (snapshot.values == 1.0 - 10 * 0.125).all(), "a copy, not a view"


def test_the_first_steps_are_not_timed() -> None:
    bench = Bench(run=run_of(replace(SETTINGS, sync_every=4)))
    bench.train(WARMUP_STEPS - 1)
    assert bench.snapshots and {snapshot.step_seconds for snapshot in bench.snapshots} == {0.0}


def test_time_spent_waiting_is_not_step_time() -> None:
    bench = Bench()
    bench.train(8)
    bench.now += 1000.0
    bench.learner.resume()
    bench.train(2)
    assert bench.snapshots[0].step_seconds == pytest.approx(0.5)


def test_a_commit_is_written_at_the_next_step_and_not_before() -> None:
    bench = Bench()
    bench.train(12)
    bench.learner.deliver(bench.next_commit(0, 5.0))
    assert bench.woken == 1
    assert (bench.read(0) == 1.0 - 12 * 0.125).all()
    assert bench.train() == [True]
    assert (bench.read(0) == 5.0).all() and (bench.read(1) == 1.0 - 13 * 0.125).all()
    assert [commit.head.version for commit in bench.applied] == [1]
    assert bench.train() == [False]


def test_the_base_is_what_the_snapshot_was_trained_from_even_with_a_newer_commit_in_the_inbox() -> None:
    bench = Bench()
    bench.train(9)
    original = bench.learner.step
    bench.learner.align()

    class ArrivesLate:
        """Delivers a commit in the very step whose snapshot is being taken: after the inbox was emptied."""

        def __init__(self, inner: ToyModel) -> None:
            self.inner = inner

        def read(self, layout: Any, out: Flat) -> None:
            bench.learner.deliver(bench.next_commit(0, 5.0))
            self.inner.read(layout, out)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    bench.learner._model = ArrivesLate(bench.model)  # type: ignore[assignment]  # a model that is late
    original(8)
    (snapshot,) = bench.snapshots
    assert (snapshot.version, snapshot.record) == (0, RUN.digest)
    assert (snapshot.base == 1.0).all()
    bench.learner.step(8)
    assert bench.learner.state.tracks[0].version == 1
    assert (snapshot.base == 1.0).all()


def test_after_a_commit_the_next_snapshot_is_against_it() -> None:
    bench = Bench()
    bench.train(12)
    commit = bench.next_commit(0, 5.0)
    bench.learner.deliver(commit)
    bench.train(18)
    snapshot = next(one for one in bench.snapshots if one.version == 1)
    assert (snapshot.record, snapshot.steps) == (commit.head.digest, 17)
    assert snapshot.base is commit.theta
    assert (snapshot.values == 5.0 - 17 * 0.125).all()


def test_an_old_or_repeated_commit_is_not_written() -> None:
    bench = Bench()
    newest, older = bench.next_commit(0, 7.0), bench.next_commit(0, 5.0)
    newest = replace(newest, head=replace(newest.head, version=3))
    for commit in (newest, older, newest):
        bench.learner.deliver(commit)
    bench.train()
    assert (bench.read(0) == 7.0).all() and len(bench.applied) == 1


def test_early_snapshots_are_flagged_and_the_wish_can_be_withdrawn() -> None:
    bench = Bench()
    bench.learner.hurry(0, True)
    bench.learner.hurry(1, True)
    bench.learner.hurry(1, False)
    bench.train(2)
    assert [(snapshot.fragment, snapshot.steps, snapshot.early) for snapshot in bench.snapshots] == [(0, 1, True)]


def test_a_hurried_fragment_waits_for_a_free_slot() -> None:
    bench = Bench(in_flight=1)
    bench.train(10)
    bench.learner.hurry(1, True)
    bench.train(2)
    assert [snapshot.fragment for snapshot in bench.snapshots] == [0]
    bench.learner.deliver(Overdue(0))
    bench.train(1)
    assert [(snapshot.fragment, snapshot.early) for snapshot in bench.snapshots] == [(0, False), (1, True)]


def test_a_due_fragment_that_found_no_slot_is_published_when_one_is_free() -> None:
    bench = Bench(in_flight=1)
    bench.train(25)
    assert bench.learner.outstanding == (0,)
    bench.learner.deliver(bench.next_commit(0, 5.0))
    bench.train(1)
    assert bench.learner.outstanding == (1,)
    assert bench.snapshots[-1].steps == 26


def test_a_snapshot_says_how_many_commits_its_node_has_trained_from() -> None:
    bench = Bench()
    for fill in (5.0, 6.0):
        bench.train(20)
        bench.learner.deliver(bench.next_commit(0, fill))
    bench.train(20)
    assert [one.age for one in bench.snapshots if one.fragment == 0] == [0, 1, 2]
    assert {one.age for one in bench.snapshots if one.fragment == 1} == {0}


def test_buffers_given_back_are_used_again() -> None:
    bench = Bench()
    bench.train(10)
    bench.learner.returned(0, bench.snapshots[0].values)
    bench.learner.deliver(bench.next_commit(0, 5.0))
    bench.train(30)
    first, *_, second = [one for one in bench.snapshots if one.fragment == 0]
    assert second.values is first.values and second.version == 1
    assert not any(one.values is first.values for one in bench.snapshots if one.fragment == 1)


def test_a_fragment_that_others_wait_for_is_reported_as_it_is() -> None:
    bench = Bench(in_flight=1)
    bench.train(10)
    for fragment in (1, 1, 0):
        bench.learner.deliver(Wanted(fragment))
    assert not bench.learner.align()
    assert [(one.fragment, one.steps, one.early) for one in bench.snapshots] == [(0, 10, False), (1, 10, True)]
    bench.learner.deliver(bench.next_commit(0, 5.0))
    bench.learner.deliver(Wanted(0))
    assert bench.learner.align()
    assert (bench.snapshots[-1].fragment, bench.snapshots[-1].version, bench.snapshots[-1].steps) == (0, 1, 0)


def test_a_learner_that_finishes_publishes_nothing_more() -> None:
    bench = Bench()
    bench.train(10)
    bench.learner.finish()
    bench.learner.deliver(Wanted(1))
    bench.learner.align()
    assert [one.fragment for one in bench.snapshots] == [0]
    bench.learner.deliver(bench.next_commit(0, 5.0))
    assert bench.learner.align() and not bench.learner.outstanding


def test_a_learner_that_flushes_publishes_what_is_left_of_every_fragment_once() -> None:
    bench = Bench(flush=True, in_flight=1)
    bench.train(14)
    assert [(one.fragment, one.steps, one.final) for one in bench.snapshots] == [(0, 10, False)]
    bench.learner.finish()
    assert [(one.fragment, one.steps, one.final) for one in bench.snapshots[1:]] == [(1, 14, True)]
    bench.learner.deliver(bench.next_commit(0, 5.0))
    bench.learner.deliver(bench.next_commit(1, 6.0))
    bench.learner.align()
    assert len(bench.snapshots) == 2 and not bench.learner.outstanding, "overwritten: nothing is left"


def test_what_an_alignment_keeps_is_flushed_after_its_commit() -> None:
    bench = Bench(flush=True, policy=Policy(Carry()))
    bench.train(14)
    bench.learner.finish()
    bench.learner.deliver(bench.next_commit(0, 5.0))
    bench.learner.align()
    assert (bench.snapshots[-1].fragment, bench.snapshots[-1].steps, bench.snapshots[-1].final) == (0, 4, True)
    bench.learner.deliver(bench.next_commit(0, 4.0))
    bench.learner.settle()
    assert bench.learner.outstanding == (1,) and len(bench.snapshots) == 3


def test_poison_rolls_the_whole_model_back_with_its_optimizer() -> None:
    bench = Bench()
    bench.train(10)
    for count in range(1, POISONED_MOST + 1):
        assert not bench.learner.poisoned
        bench.train(1)
        bench.learner.deliver(replace(bench.next_commit(0, 5.0), merged=False, refusal="nonfinite"))
        bench.learner.align()
        assert (bench.read(0) == 5.0).all() and (bench.read(1) == 1.0).all()
        assert bench.model.resets == count
    assert bench.learner.poisoned


def test_another_refusal_costs_its_fragment_only() -> None:
    bench = Bench()
    bench.train(10)
    bench.learner.deliver(replace(bench.next_commit(0, 5.0), merged=False, refusal="stale"))
    bench.learner.align()
    assert (bench.read(1) == 1.0 - 10 * 0.125).all() and bench.model.resets == 0


def test_overlap_0_is_a_barrier() -> None:
    bench = Bench(overlap_steps=0)
    bench.train(10)
    assert bench.learner.blocked
    bench.learner.deliver(bench.next_commit(0, 5.0))
    assert bench.learner.align()
    assert not bench.learner.blocked


def test_settling_leaves_the_newest_committed_model() -> None:
    bench = Bench()
    bench.train(12)
    bench.learner.deliver(bench.next_commit(0, 5.0))
    bench.learner.settle()
    assert (bench.read(0) == 5.0).all() and (bench.read(1) == 1.0).all()


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_in_time_commits_keep_a_fragment_on_its_grid(fragments: int) -> None:
    run = run_of(replace(SETTINGS, fragments=fragments))
    bench = Bench(run=run, in_flight=fragments)
    for _ in range(60):
        before = len(bench.snapshots)
        bench.train()
        for snapshot in bench.snapshots[before:]:
            assert is_due(snapshot.local_step, snapshot.fragment, fragments, 20)
            bench.learner.deliver(bench.next_commit(snapshot.fragment, 5.0))
    assert len(bench.snapshots) == 3 * fragments
