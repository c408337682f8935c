import numpy as np
import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.keys import checked_node
from gradientmail_core.session.arguments import check_numbers, default_node, length_of, whole_number


@pytest.mark.parametrize("count", [3, np.int64(3), np.array(3)])
def test_any_kind_of_whole_number_counts(count):
    assert whole_number(count) == 3


@pytest.mark.parametrize("count", [-1, 2.5, "7", None])
def test_what_is_no_number_of_samples_is_refused(count):
    with pytest.raises(ConfigurationError, match=r"step\("):
        whole_number(count)


def test_a_batch_without_a_length_counts_as_one_sample():
    assert length_of([1, 2, 3]) == 3
    assert length_of(iter([1, 2, 3])) == 1


@pytest.mark.parametrize("numbers", [(0, 120.0, 300.0), (1, 0.0, 300.0), (1, 120.0, -1.0)])
def test_counts_and_times_that_cannot_work_are_refused(numbers):
    with pytest.raises(ConfigurationError):
        check_numbers(*numbers)
    check_numbers(1, 120.0, 300.0)


def test_every_process_gets_a_name_of_its_own_that_a_key_allows():
    names = {default_node() for _ in range(5)}
    assert len(names) == 5
    assert all(checked_node(name) == name for name in names)
