"""Keys and records of the patterns: back and forth without loss, and nothing else is taken for one."""

import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.recipes import (
    RankKey,
    UnitKey,
    UnitRecord,
    arrival_key,
    arrived_node,
    checked_name,
    open_key,
    parse_rank,
    parse_unit,
    parse_unit_record,
)

RUN = "5a" * 16


@pytest.mark.parametrize(
    "key", [UnitKey("q", 7, "claim", 3), UnitKey("q-1.x", 0, "release", 0), UnitKey("q", 9, "done")]
)
def test_unit_keys_come_back(key: UnitKey) -> None:
    assert parse_unit(key.path) == key


def test_rank_and_barrier_keys_come_back() -> None:
    assert parse_rank(RankKey(3, 12).path) == RankKey(3, 12)
    assert arrived_node(arrival_key("epoch-1", "node-b")) == "node-b"
    assert arrived_node(open_key("epoch-1")) is None


@pytest.mark.parametrize(
    "key",
    ["units/q/7/done", "units/q/00000007/done-0001", "units/q/00000007/claim", "units/q/00000007/claim-1", "units//x"],
)
def test_other_unit_keys_are_nobodys(key: str) -> None:
    assert parse_unit(key) is None and parse_rank(key) is None


def test_unit_records_come_back_and_those_of_other_runs_do_not() -> None:
    record = UnitRecord(RUN, "a", "0f", 5)
    assert parse_unit_record(record.encoded(), RUN) == record
    for body in (UnitRecord("66" * 16, "a", "0f", 5).encoded(), b"", b"[]", UnitRecord(RUN, "a", "0f", -1).encoded()):
        assert isinstance(parse_unit_record(body, RUN), Rejected)


@pytest.mark.parametrize("name", ["", "../x", "A", "a/b", "x" * 65])
def test_names_that_fit_no_key_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        checked_name(name, "queue")
