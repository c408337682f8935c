"""Units dealt pass after pass, to loops that hold several of them and never wait for each other."""

from collections import Counter

import pytest

import gradientmail_core as gm
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.patterns.shared_passes import SharedPasses, Unit, newest_pass, queue_name
from gradientmail_core.patterns.units import UnitLedger
from tests.core.patterns.party import Town, in_town
from tests.core.session.test_recipes import joined


@pytest.fixture
def nodes():
    """Two joined sessions on one mailbox."""
    mailbox = gm.MemoryMailbox()
    sessions = [joined(mailbox, node) for node in "ab"]
    yield sessions
    for session in sessions:
        session.abort()


def everything(passes: SharedPasses, size: int = 3) -> list[Unit]:
    """What is drawn until the pass ends, one draw ahead of what is confirmed."""
    units: list[Unit] = []
    while drawn := passes.draw(size):
        units += drawn
        if len(units) > size:
            passes.confirm()
    for _ in range(2):
        passes.confirm()
    return units


def test_a_pass_ends_though_others_hold_some_of_it_and_those_are_theirs(nodes) -> None:
    first, second = (session.shared_passes(10, block=2) for session in nodes)
    for passes in (first, second):
        passes.begin()
    mine, theirs = first.draw(2), second.draw(2)
    mine += everything(first)
    theirs += everything(second)
    assert Counter(mine + theirs) == dict.fromkeys((Unit(0, unit) for unit in range(10)), 1)
    first.begin()
    assert (first.number, first.draw(1)) == (1, [Unit(1, 0)])


def test_what_was_drawn_and_not_confirmed_is_drawn_again(nodes) -> None:
    passes = nodes[0].shared_passes(10, block=10)
    passes.begin()
    assert [unit.unit for unit in passes.draw(3) + passes.draw(3)] == [0, 1, 2, 3, 4, 5]
    passes.confirm()
    assert passes.state_dict() == {"0": {"0": 3}}
    passes.begin()
    assert [unit.unit for unit in passes.draw(5)] == [3, 4, 5, 6, 7]


def test_what_is_dropped_is_finished_with_what_came_before(nodes) -> None:
    passes = nodes[0].shared_passes(4, block=4)
    passes.begin()
    passes.draw(3)
    passes.draw(3)
    passes.drop_last()
    assert passes.state_dict() == {"0": {"0": 0}}
    passes.confirm()
    assert passes.state_dict() == {}


def test_a_later_pass_can_be_begun_at_once(nodes) -> None:
    passes = nodes[0].shared_passes(2)
    passes.begin(at_least=3)
    assert passes.draw(4) == [Unit(3, 0), Unit(3, 1)]


def test_nothing_cannot_be_dealt(nodes) -> None:
    with pytest.raises(ConfigurationError, match="no units"):
        nodes[0].shared_passes(0)


@pytest.mark.parametrize("begun", [0, 1, 2, 3, 8, 11])
def test_who_comes_late_begins_with_the_newest(begun: int) -> None:
    async def main(town: Town) -> None:
        for number in range(begun):
            ledger = UnitLedger(town.party("a"), queue_name("data", number), 2, 1)
            for _ in range(2):
                block = await ledger.claim()
                assert block is not None
                if number < begun - 1:
                    await ledger.finish(block)
        assert await newest_pass(town.party("b"), "data", 2, 1) == max(0, begun - 1)
        if begun:
            for index in range(2):
                await town.mailbox.put(f"units/{queue_name('data', begun - 1)}/{index:08d}/done", b"")
            assert await newest_pass(town.party("b"), "data", 2, 1) == begun

    in_town(main)
