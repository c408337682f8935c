"""Answers of a mailbox become facts: who won a create, what a round decided, where a chain ends."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.clock import Clock
from gradientmail_core.errors import MailboxUnavailable, RunMismatch
from gradientmail_core.mailbox import Faults, FaultyMailbox, MemoryMailbox, MeteredMailbox, RetryingMailbox
from gradientmail_core.mailbox.base import Body, CreateOutcome, Mailbox
from gradientmail_core.protocol.exchange import (
    SLOTS_MOST,
    Decided,
    Lost,
    Open,
    Won,
    bounded_get,
    commit_round,
    create_once,
    get_section,
    newest_round,
    put_section,
    read_roll,
    read_round,
    written,
)
from gradientmail_core.protocol.fields import COUNT_MAX, Rejected
from gradientmail_core.protocol.keys import roll_key, tape_key
from gradientmail_core.protocol.records import (
    RECORD_LONGEST,
    Participant,
    Refusal,
    RoundRecord,
    Section,
    abridged,
    completed,
    digest,
    roll_of,
)
from gradientmail_core.sim.loop import VirtualClock, run_virtually
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Piece
from tests.core.protocol.records import OTHER_RUN, ROUND, RUN

LAYOUT = FragmentLayout(0, (Piece("w", (3, 4), 0), Piece("v", (5,), 12)))
VALUES: Flat = np.linspace(-1, 1, 17, dtype=np.float32)


def virtually(main: Callable[[MemoryMailbox, Clock], Coroutine[Any, Any, None]]) -> None:
    """Run a test on virtual time with a mailbox of its own."""
    run_virtually(lambda loop: main(MemoryMailbox("run"), VirtualClock(loop)))


def retried(mailbox: Mailbox, clock: Clock, faults: Faults, seed: int = 0) -> Mailbox:
    return RetryingMailbox(FaultyMailbox(mailbox, clock, random.Random(seed), faults), clock, random.Random(seed))


class LosesAnswers:
    """A mailbox whose creates take effect while the first answers are lost."""

    def __init__(self, inner: MemoryMailbox, lost: int) -> None:
        self._inner = inner
        self._lost = lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, key: str, body: Body) -> CreateOutcome:
        outcome = await self._inner.create(key, body)
        if self._lost:
            self._lost -= 1
            raise MailboxUnavailable("The answer was lost.")
        return outcome


class Forgetful:
    """A mailbox that does not find what exists, the first few times it is asked."""

    def __init__(self, inner: MemoryMailbox, misses: int) -> None:
        self._inner = inner
        self._misses = misses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        if self._misses:
            self._misses -= 1
            return None
        return await self._inner.get(key, limit=limit)


# -- create once -------------------------------------------------------------------------------------------


def test_the_first_create_wins_and_the_second_reads_the_first() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        assert await create_once(mailbox, clock, "creation/0", b"one") == Won()
        assert await create_once(mailbox, clock, "creation/0", b"two") == Lost(b"one")

    virtually(main)


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_a_lost_answer_is_no_lost_race(lost: int) -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        flaky: Any = LosesAnswers(mailbox, lost)
        assert await create_once(RetryingMailbox(flaky, clock, random.Random(0)), clock, "creation/0", b"one") == Won()
        assert await create_once(mailbox, clock, "creation/0", b"two") == Lost(b"one")

    virtually(main)


def test_an_unknown_outcome_is_not_guessed() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        flaky: Any = LosesAnswers(mailbox, 1)
        with pytest.raises(MailboxUnavailable):
            await create_once(flaky, clock, "creation/0", b"one")
        assert await create_once(flaky, clock, "creation/0", b"one") == Won()

    virtually(main)


def test_an_object_that_is_taken_and_not_found_is_asked_for_again() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        await mailbox.create("creation/0", b"one")
        lagging: Any = Forgetful(mailbox, 3)
        assert await create_once(lagging, clock, "creation/0", b"two") == Lost(b"one")
        assert clock.now() == pytest.approx(0.3)

    virtually(main)


def test_a_taken_key_with_too_large_an_object_is_lost() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        await mailbox.create("creation/0", b"x" * 100)
        assert await create_once(mailbox, clock, "creation/0", b"two", limit=10) == Lost(b"")
        assert await create_once(mailbox, clock, "creation/0", b"x" * 100, limit=10) == Won()

    virtually(main)


def test_of_many_that_race_through_bad_weather_one_wins() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        faults = Faults(unavailable=0.2, undecided=0.2, lost_answer=0.3, missing_read=0.2, slow=0.3)
        bodies = [f"node {number}".encode() for number in range(12)]
        outcomes = await asyncio.gather(
            *(
                create_once(retried(mailbox, clock, faults, seed), clock, "creation/0", body)
                for seed, body in enumerate(bodies)
            )
        )
        winners = [body for body, outcome in zip(bodies, outcomes, strict=True) if isinstance(outcome, Won)]
        assert winners == [await mailbox.get("creation/0")]
        assert all(outcome == Lost(winners[0]) for outcome in outcomes if not isinstance(outcome, Won))

    virtually(main)


def test_a_bounded_get_tells_missing_from_too_large() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        await mailbox.put("creation/0", b"12345")
        assert await bounded_get(mailbox, "creation/0", 5) == b"12345"
        assert await bounded_get(mailbox, "creation/0", 4) == b""
        assert await bounded_get(mailbox, "creation/1", 4) is None

    virtually(main)


# -- rounds and their slots --------------------------------------------------------------------------------

GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"\xff\xfe",
    "another thing": b'{"hello": "world"}',
    "too large": b" " * (RECORD_LONGEST + 1),
    "another run": replace(ROUND, run=OTHER_RUN).encoded(),
    "another round": replace(ROUND, round=8).encoded(),
    "another format": replace(ROUND, format=2).encoded(),
}


def test_an_undecided_round_is_open_in_slot_0() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        assert await read_round(mailbox, RUN, 7) == Open(0)

    virtually(main)


def test_a_committed_round_is_read_by_everyone() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        decided = Decided(ROUND, digest(ROUND.encoded()))
        assert await commit_round(mailbox, clock, ROUND) == decided
        assert await read_round(mailbox, RUN, 7) == decided
        assert await mailbox.get(tape_key(7, 0)) == ROUND.encoded()

    virtually(main)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_spends_a_slot_for_everyone_alike(garbage: str) -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        await mailbox.put(tape_key(7, 0), GARBAGE[garbage])
        assert await read_round(mailbox, RUN, 7) == Open(1)
        ours = await commit_round(mailbox, clock, ROUND)
        theirs = await commit_round(mailbox, clock, replace(ROUND, node="b", nonce="ff"))
        assert ours == theirs == await read_round(mailbox, RUN, 7) == Decided(ROUND, digest(ROUND.encoded()))
        assert await mailbox.get(tape_key(7, 1)) == ROUND.encoded()
        assert await mailbox.get(tape_key(7, 2)) is None

    virtually(main)


def test_several_spent_slots_are_passed() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        for slot in range(5):
            await mailbox.put(tape_key(7, slot), b"garbage")
        await commit_round(mailbox, clock, ROUND)
        assert await mailbox.get(tape_key(7, 5)) == ROUND.encoded()

    virtually(main)


def test_a_record_beyond_an_unspent_slot_counts_for_nothing() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        await mailbox.put(tape_key(7, 1), replace(ROUND, nonce="ff").encoded())
        assert await read_round(mailbox, RUN, 7) == Open(0)
        assert (await commit_round(mailbox, clock, ROUND)).record == ROUND

    virtually(main)


def test_a_read_that_went_wrong_once_does_not_spend_a_slot() -> None:
    class Garbles(Forgetful):
        async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
            body = await self._inner.get(key, limit=limit)
            self._misses -= 1
            return body[:10] if body and self._misses >= 0 else body

    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        await commit_round(mailbox, clock, ROUND)
        garbling: Any = Garbles(mailbox, 1)
        assert (await commit_round(garbling, clock, replace(ROUND, nonce="ff"))).record == ROUND

    virtually(main)


def test_the_first_of_two_commits_is_everybodys() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        faults = Faults(unavailable=0.2, undecided=0.2, lost_answer=0.4, missing_read=0.2, slow=0.5)
        records = [replace(ROUND, node=f"n{number}", nonce=f"{number:02x}") for number in range(8)]
        decided = await asyncio.gather(
            *(commit_round(retried(mailbox, clock, faults, seed), clock, r) for seed, r in enumerate(records))
        )
        assert {one.record for one in decided} == {(await decided_record(mailbox))}
        assert await mailbox.get(tape_key(7, 1)) is None

    virtually(main)


async def decided_record(mailbox: Mailbox) -> RoundRecord:
    state = await read_round(mailbox, RUN, 7)
    assert isinstance(state, Decided)
    return state.record


def test_a_prefix_full_of_garbage_is_explained() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        for slot in range(SLOTS_MOST):
            await mailbox.put(tape_key(7, slot), b"garbage")
        with pytest.raises(RunMismatch, match="prefix of its own"):
            await read_round(mailbox, RUN, 7)

    virtually(main)


def test_a_record_that_others_would_refuse_is_never_written() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        with pytest.raises(ValueError, match="merged_tokens"):
            await commit_round(mailbox, clock, replace(ROUND, merged_tokens=COUNT_MAX + 1))
        assert await read_round(mailbox, RUN, 7) == Open(0)

    virtually(main)


# -- the end of a chain ------------------------------------------------------------------------------------


async def chain(mailbox: MemoryMailbox, length: int, fragment: int, fragments: int) -> None:
    for version in range(1, length + 1):
        round = version * fragments + fragment
        await mailbox.put(tape_key(round, 0), replace(ROUND, round=round).encoded())


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 100, 1000])
@pytest.mark.parametrize(("fragment", "fragments"), [(0, 1), (2, 3)])
def test_the_end_of_a_chain_is_found_in_few_requests(length: int, fragment: int, fragments: int) -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        await chain(mailbox, length, fragment, fragments)
        metered = MeteredMailbox(mailbox)
        found = await newest_round(metered, RUN, fragment, fragments, 0)
        assert (found.record.round // fragments if found else 0) == length
        assert metered.usage.requests == metered.usage.gets <= 2 * length.bit_length() + 1

    virtually(main)


@pytest.mark.parametrize("known", [0, 1, 996, 999, 1000])
def test_from_a_hint_near_the_end_the_search_is_short(known: int) -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        await chain(mailbox, 1000, 0, 1)
        metered = MeteredMailbox(mailbox)
        found = await newest_round(metered, RUN, 0, 1, known)
        assert (found.record.round if found else known) == 1000
        assert metered.usage.gets <= 2 * (1000 - known).bit_length() + 1

    virtually(main)


def test_a_record_that_is_not_found_ends_the_search_early_and_harms_nothing() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        await chain(mailbox, 50, 0, 1)
        forgetful: Any = Forgetful(mailbox, 1)
        found = await newest_round(forgetful, RUN, 0, 1, 0)
        again = await newest_round(forgetful, RUN, 0, 1, found.record.round if found else 0)
        assert again is not None and again.record.round == 50

    virtually(main)


# -- payloads ----------------------------------------------------------------------------------------------


def test_a_section_comes_back_bit_for_bit() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        section = await put_section(mailbox, clock, "theta", 7, "a", LAYOUT, VALUES)
        values = await get_section(mailbox, clock, section, LAYOUT)
        assert not isinstance(values, Rejected)
        assert values.tobytes() == VALUES.tobytes()
        assert section.sha256 in section.key and section.key.startswith("blobs/0000000007/a-")

    virtually(main)


def test_equal_values_have_one_key_and_digest() -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        one = await put_section(mailbox, clock, "theta", 7, "a", LAYOUT, VALUES)
        assert one == await put_section(mailbox, clock, "theta", 7, "a", LAYOUT, VALUES.copy())
        other = await put_section(mailbox, clock, "theta", 7, "a", LAYOUT, -VALUES)
        assert other.sha256 != one.sha256

    virtually(main)


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long", "flipped", "garbage", "codec", "layout"])
def test_a_damaged_section_is_refused_with_a_reason(damage: str) -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        section, layout = await put_section(mailbox, clock, "theta", 7, "a", LAYOUT, VALUES), LAYOUT
        body = await mailbox.get(section.key) or b""
        match damage:
            case "missing":
                await mailbox.delete(section.key)
            case "codec":
                section = replace(section, codec="BF16")
            case "layout":
                layout = replace(LAYOUT, pieces=LAYOUT.pieces[:1])
            case _:
                damaged = {
                    "empty": b"",
                    "short": body[:-1],
                    "long": body + bytes(2**21),
                    "flipped": body[:-1] + bytes([body[-1] ^ 1]),
                    "garbage": b"\xff" * len(body),
                }
                await mailbox.put(section.key, damaged[damage])
        found = await get_section(mailbox, clock, section, layout)
        assert isinstance(found, Rejected) and found.reason

    virtually(main)


def test_sections_of_equal_numbers_do_not_take_each_others_place() -> None:
    """A fragment of zeros and its outer state of zeros have the same data under other names."""

    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        theta = FragmentLayout(0, (Piece("w", (4,), 0),))
        outer = FragmentLayout(0, (Piece("momentum/w", (4,), 0),))
        zeros = np.zeros(4, np.float32)
        first = await put_section(mailbox, clock, "theta", 7, "a", theta, zeros)
        second = await put_section(mailbox, clock, "outer", 7, "a", outer, zeros)
        for section, layout in ((first, theta), (second, outer)):
            found = await get_section(mailbox, clock, section, layout)
            assert not isinstance(found, Rejected), found

    virtually(main)


def crowd(count: int) -> RoundRecord:
    """A record in which so many nodes took part, and some of them were refused."""
    who = tuple(
        Participant(f"node-{number:05d}", f"{number:016x}", digest(str(number)), 20, 160, 1 / count)
        for number in range(count)
    )
    refusals = tuple(Refusal(f"bad-{number}", "0a", digest(f"bad {number}"), "stale") for number in range(count // 3))
    return replace(ROUND, participants=who, refusals=refusals, merged_tokens=160 * count)


@pytest.mark.parametrize(("count", "rolled"), [(1, False), (64, False), (65, True), (3000, True)])
def test_a_crowd_is_committed_and_read_back_whole(count: int, rolled: bool) -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        record = crowd(count)
        short = await written(mailbox, record)
        assert (short.roll is not None) == rolled and len(short.encoded()) < 2**16
        assert isinstance(await create_once(mailbox, clock, tape_key(record.round, 0), short.encoded()), Won)
        found = await read_round(mailbox, record.run, record.round)
        assert isinstance(found, Decided) and found.record.headcount == count and not found.record.void
        full = await read_roll(mailbox, found.record)
        assert isinstance(full, RoundRecord)
        assert (full.participants, full.refusals) == (record.participants, record.refusals)

    virtually(main)


@pytest.mark.parametrize("forged", [None, b"", b"{}", b"not json"])
def test_a_roll_that_is_missing_or_another_is_no_roll(forged: bytes | None) -> None:
    async def main(mailbox: MemoryMailbox, clock: Clock) -> None:
        short = await written(mailbox, crowd(100))
        assert short.roll is not None
        await mailbox.delete(short.roll.key)
        if forged is not None:
            await mailbox.put(short.roll.key, forged)
        assert isinstance(await read_roll(mailbox, short), Rejected)

    virtually(main)


def test_a_roll_must_list_as_many_as_its_record_counts() -> None:
    fewer = roll_of(crowd(99))
    short = abridged(crowd(100), Section("roll", roll_key(ROUND.round, "a", "0" * 64), digest(fewer), "JSON"))
    assert isinstance(completed(short, fewer), Rejected)
