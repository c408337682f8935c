"""The grid of due steps: every fragment once a cycle, evenly, and nothing in between."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.algorithms.schedule import first_due_after, is_due, offset_in_cycle
from gradientmail_core.errors import ConfigurationError


@st.composite
def grids(draw: st.DrawFn) -> tuple[int, int]:
    """A number of fragments and a cycle that has room for them."""
    fragments = draw(st.integers(1, 40))
    return fragments, draw(st.integers(fragments, 300))


def test_the_papers_example_is_on_the_grid() -> None:
    due = [first_due_after(step, 0, 2, 100) for step in (0, 49, 50, 51, 150)]
    assert due == [50, 50, 150, 150, 250]
    assert first_due_after(0, 1, 2, 100) == 100


@settings(deadline=None)
@given(grids(), st.integers(0, 5000), st.data())
def test_the_next_due_step_is_on_the_grid_with_none_before_it(
    grid: tuple[int, int], step: int, data: st.DataObject
) -> None:
    fragments, cycle = grid
    fragment = data.draw(st.integers(0, fragments - 1))
    due = first_due_after(step, fragment, fragments, cycle)
    assert step < due
    assert due >= offset_in_cycle(fragment, fragments, cycle)
    assert (due - offset_in_cycle(fragment, fragments, cycle)) % cycle == 0
    assert due - step <= cycle or due == offset_in_cycle(fragment, fragments, cycle)
    assert is_due(due, fragment, fragments, cycle)
    assert not any(is_due(between, fragment, fragments, cycle) for between in range(step + 1, due))


@settings(deadline=None)
@given(grids(), st.integers(0, 1000))
def test_any_cycle_long_window_holds_every_fragment_once(grid: tuple[int, int], start: int) -> None:
    fragments, cycle = grid
    window = range(cycle + start + 1, 2 * cycle + start + 1)
    due = [fragment for step in window for fragment in range(fragments) if is_due(step, fragment, fragments, cycle)]
    assert sorted(due) == list(range(fragments))


@settings(deadline=None)
@given(grids())
def test_due_steps_of_a_cycle_are_distinct_and_even(grid: tuple[int, int]) -> None:
    fragments, cycle = grid
    steps = [first_due_after(0, fragment, fragments, cycle) for fragment in range(fragments)]
    gaps = {later - earlier for earlier, later in zip([0, *steps], steps, strict=False)}
    assert steps[-1] == cycle
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(("fragment", "fragments", "cycle"), [(2, 2, 10), (-1, 2, 10), (0, 0, 10), (0, 1, 0)])
def test_a_grid_that_cannot_be_is_refused(fragment: int, fragments: int, cycle: int) -> None:
    with pytest.raises(ConfigurationError):
        first_due_after(0, fragment, fragments, cycle)
