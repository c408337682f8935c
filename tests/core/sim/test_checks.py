"""What a run must be, read from its store alone: the checks find the forks and gaps that are put there."""

from dataclasses import replace
from typing import Any

import pytest

from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.run import Host, Run
from gradientmail_core.protocol.keys import MANIFEST, tape_key
from gradientmail_core.protocol.records import digest
from gradientmail_core.sim.checks import committed_parameters, forks, manifest_of, tape
from gradientmail_core.sim.world import ToyModel
from tests.core.engine.parts import Place, committed, created, first_head, record_after, virtually


def played(main: Any) -> None:
    """Run a test on a run with three commits of fragment 0 and one of fragment 1."""

    async def placed(place: Place) -> None:
        host = place.host()
        run = await created(host, model=ToyModel(fill=0.5))
        head = first_head(run)
        for fill in (1.0, 2.0, 3.0):
            head = await committed(host, run, head, fill)
        await committed(host, run, first_head(run, 1), 9.0)
        await main(place, host, run, head)

    virtually(placed)


def test_the_tape_is_every_record_in_order() -> None:
    async def main(place: Place, host: Host, run: Run, head: Head) -> None:
        assert [record.round for record in await tape(place.mailbox)] == [2, 3, 4, 6]
        assert await manifest_of(place.mailbox) == (run.manifest, run.digest)

    played(main)


def test_garbage_and_records_past_a_decided_slot_do_not_count() -> None:
    async def main(place: Place, host: Host, run: Run, head: Head) -> None:
        record = record_after(head, run)
        await place.mailbox.put(tape_key(8, 0), b"garbage")
        await place.mailbox.put(tape_key(8, 1), record.encoded())
        await place.mailbox.put(tape_key(8, 2), replace(record, nonce="ff").encoded())
        assert (await tape(place.mailbox))[-1] == record
        assert await forks(place.mailbox) == []

    played(main)


def test_linked_chains_are_no_fork() -> None:
    async def main(place: Place, host: Host, run: Run, head: Head) -> None:
        assert await forks(place.mailbox) == []

    played(main)


def test_a_record_that_follows_another_content_is_a_fork() -> None:
    async def main(place: Place, host: Host, run: Run, head: Head) -> None:
        await committed(host, run, replace(head, digest="0" * 64), 4.0)
        assert await forks(place.mailbox) == [8]

    played(main)


def test_a_rewritten_record_is_a_fork_at_its_successor() -> None:
    async def main(place: Place, host: Host, run: Run, head: Head) -> None:
        (record,) = [one for one in await tape(place.mailbox) if one.round == 4]
        await place.mailbox.put(tape_key(4, 0), replace(record, nonce="ff").encoded())
        assert await forks(place.mailbox) == [6]

    played(main)


@pytest.mark.parametrize(("lost", "broken"), [(2, [4]), (4, [6]), (6, [])])
def test_a_missing_record_is_a_gap_at_its_successor(lost: int, broken: list[int]) -> None:
    async def main(place: Place, host: Host, run: Run, head: Head) -> None:
        await place.mailbox.delete(tape_key(lost, 0))
        assert await forks(place.mailbox) == broken

    played(main)


def test_another_manifest_is_a_fork_of_everything() -> None:
    async def main(place: Place, host: Host, run: Run, head: Head) -> None:
        body = replace(run.manifest, nonce="ff").encoded()
        await place.mailbox.put(MANIFEST, body)
        assert await forks(place.mailbox) == [2, 3] and digest(body) != run.digest

    played(main)


def test_the_committed_parameters_are_the_newest_of_each_fragment() -> None:
    async def main(place: Place, host: Host, run: Run, head: Head) -> None:
        found = await committed_parameters(place.mailbox)
        assert sorted(found) == [f"block.{number}.weight" for number in range(8)]
        fragment = {piece.key: layout.fragment for layout in run.layouts for piece in layout.pieces}
        assert all((values == (3.0, 9.0)[fragment[name]]).all() for name, values in found.items())

    played(main)


def test_without_commits_they_are_the_initial_ones() -> None:
    async def main(place: Place) -> None:
        await created(place.host(), model=ToyModel(fill=0.5))
        assert all((values == 0.5).all() for values in (await committed_parameters(place.mailbox)).values())

    virtually(main)


def test_a_place_without_a_run_and_a_lost_payload_are_found() -> None:
    async def empty(place: Place) -> None:
        with pytest.raises(AssertionError, match="no manifest"):
            await tape(place.mailbox)

    async def main(place: Place, host: Host, run: Run, head: Head) -> None:
        section = head.section("theta")
        assert section is not None
        await place.mailbox.delete(section.key)
        with pytest.raises(AssertionError, match="missing"):
            await committed_parameters(place.mailbox)

    virtually(empty)
    played(main)
