"""Sweeping: what no one can need any more goes, and the two newest versions of every fragment are always complete."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradientmail_core.engine.chain import Head, succeeded
from gradientmail_core.engine.run import Board, Host, Run
from gradientmail_core.engine.sweeping import HEAD_HINT_SECONDS, Sweeper, remove_orphans
from gradientmail_core.protocol.exchange import Decided
from gradientmail_core.protocol.keys import ClaimKey, DeltaKey, HeadKey, LeaseKey, blob_key, parse_live, tape_key
from gradientmail_core.protocol.records import Section, digest
from tests.core.engine.parts import TIMEOUTS, Place, created, first_head, record_after, virtually


class Chain:
    """Fragment 0 of a real run in a mailbox, committed by hand and swept by the sweeper under test."""

    def __init__(self, place: Place, host: Host, run: Run) -> None:
        self.place, self.host, self.run = place, host, run
        self.board = Board(host)
        self.board.listed([])
        self.sweeper = Sweeper(host, run, self.board)
        self.head: Head = first_head(run, now=host.clock.now())
        self.named: list[tuple[Section, ...]] = [self.head.sections]
        self.board.open_rounds.update({fragment: run.fragments + fragment for fragment in range(run.fragments)})

    async def commit(self, *, void: bool = False, sweep: bool = True, heard: Sequence[str] = ()) -> None:
        """Write the next commit of the chain, with payloads unless it is void, and sweep after it."""
        round = self.head.next_round(self.run.fragments)
        record = record_after(self.head, self.run, nodes=() if void else ("a",), sections=self.sections(round, void))
        for section in () if void else record.sections:
            await self.place.mailbox.put(section.key, b"payload")
        await self.place.mailbox.create(tape_key(round, 0), record.encoded())
        decided = Decided(record, digest(record.encoded()))
        self.head = succeeded(self.head, decided, self.run.fragments, self.host.clock.now())
        self.named.append(record.sections)
        self.board.open_rounds[0] = self.head.next_round(self.run.fragments)
        if sweep:
            await self.sweeper.committed(self.head, heard)

    def sections(self, round: int, void: bool) -> tuple[Section, ...]:
        if void:
            return self.head.sections
        digests = (("theta", f"{round:064x}"), ("outer", f"{round + 2**200:064x}"))
        return tuple(Section(name, blob_key(round, "a", sha), sha, "F32") for name, sha in digests)  # type: ignore[arg-type]  # one of two names

    def held(self, version: int) -> bool:
        """Whether every payload that a version names is there."""
        return {section.key for section in self.named[version]} <= set(self.place.listed("blobs/"))

    def complete(self) -> list[int]:
        return [version for version in range(len(self.named)) if self.held(version)]

    async def list(self) -> None:
        """Let the board see the mailbox."""
        self.board.listed([key for key in map(parse_live, self.place.listed("live/")) if key is not None])


def chained(main: Any) -> None:
    async def placed(place: Place) -> None:
        host = place.host()
        await main(Chain(place, host, await created(host)))

    virtually(placed)


def test_the_two_newest_versions_and_the_first_stay() -> None:
    async def main(chain: Chain) -> None:
        for version in range(1, 9):
            await chain.commit()
            assert chain.complete() == sorted({0, max(version - 1, 0), version})
        assert len(chain.place.listed("tape/")) == 8, "records are never deleted"

    chained(main)


def test_what_a_void_round_names_stays_with_it() -> None:
    async def main(chain: Chain) -> None:
        await chain.commit()
        await chain.commit()
        await chain.commit(void=True)
        await chain.commit(void=True)
        assert chain.named[4] == chain.named[2] and chain.held(4)
        await chain.commit()
        assert chain.held(4) and chain.held(5)
        await chain.commit()
        assert chain.complete() == [0, 5, 6]

    chained(main)


def test_the_initial_parameters_stay_even_if_the_first_rounds_were_void() -> None:
    async def main(chain: Chain) -> None:
        await chain.commit(void=True)
        await chain.commit(void=True)
        for _ in range(6):
            await chain.commit()
        assert chain.complete()[0] == 0

    chained(main)


def test_a_new_closer_sweeps_what_the_one_before_left() -> None:
    async def main(chain: Chain) -> None:
        for _ in range(3):
            await chain.commit()
        chain.sweeper = Sweeper(chain.host, chain.run, chain.board)
        await chain.commit()
        assert chain.complete() == [0, 3, 4]
        await chain.commit()
        assert chain.complete() == [0, 4, 5]

    chained(main)


def test_a_record_that_is_not_found_costs_no_payload() -> None:
    async def main(chain: Chain) -> None:
        await chain.commit()
        await chain.commit()
        await chain.commit(void=True, sweep=False)

        class Blind:
            """Does not find the record of version 3 the first time it is asked."""

            missing = tape_key(3 * chain.run.fragments, 0)

            async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
                if key == self.missing:
                    self.missing = ""
                    return None
                return await chain.place.mailbox.get(key, limit=limit)

            def __getattr__(self, name: str) -> Any:
                return getattr(chain.place.mailbox, name)

        blind: Any = Blind()
        chain.sweeper = Sweeper(replace(chain.host, mailbox=blind), chain.run, chain.board)
        await chain.commit()
        assert chain.held(3) and chain.held(4)

    chained(main)


def test_snapshots_and_claims_of_the_closed_round_go_and_others_stay() -> None:
    async def main(chain: Chain) -> None:
        closed, other, later = 2, 3, 4
        gone = [DeltaKey(closed, "a").path, DeltaKey(closed, "late").path, ClaimKey(closed, 0).path]
        kept = [DeltaKey(other, "a").path, DeltaKey(later, "a").path, ClaimKey(other, 0).path]
        for key in (*gone, *kept, DeltaKey(closed, "unseen").path):
            await chain.place.mailbox.put(key, b"snapshot")
        await chain.place.mailbox.delete(DeltaKey(closed, "unseen").path)
        await chain.list()
        await chain.place.mailbox.put(DeltaKey(closed, "unseen").path, b"snapshot")
        await chain.commit(heard=["a"])
        left = chain.place.listed("live/deltas/") + chain.place.listed("live/claims/")
        assert sorted(left) == sorted([*kept, DeltaKey(closed, "unseen").path])
        await chain.list()
        await chain.sweeper.tidy(0)
        assert DeltaKey(closed, "unseen").path not in chain.place.listed("live/")

    chained(main)


def test_a_snapshot_that_was_heard_and_never_listed_goes_too() -> None:
    async def main(chain: Chain) -> None:
        await chain.place.mailbox.put(DeltaKey(2, "b").path, b"snapshot")
        await chain.commit(heard=["b"])
        assert not chain.place.listed("live/deltas/")

    chained(main)


def test_while_a_node_joins_everything_stays_and_goes_afterwards() -> None:
    async def main(chain: Chain) -> None:
        joiner = LeaseKey("z", 0, "j", 0, "0" * 16)
        for _ in range(2):
            await chain.commit()
        chain.board.listed([joiner])
        for _ in range(3):
            await chain.commit(heard=["a"])
        assert chain.complete() == [0, 1, 2, 3, 4, 5]
        chain.board.listed([replace(joiner, beat=1, state="t")])
        await chain.commit()
        assert chain.complete() == [0, 5, 6]

    chained(main)


def test_what_is_left_stays_when_a_node_begins_to_join_during_the_removal() -> None:
    async def main(chain: Chain) -> None:
        joiner = LeaseKey("z", 0, "j", 0, "0" * 16)
        chain.board.listed([joiner])
        for _ in range(12):
            await chain.commit()
        chain.board.listed([replace(joiner, beat=1, state="t")])
        removal = asyncio.ensure_future(chain.sweeper.release())
        await asyncio.sleep(0)
        chain.board.listed([replace(joiner, node="y")])
        await removal
        left = chain.complete()
        assert 0 < len(left) - 3 < 10, left

    chained(main)


def test_a_joiner_that_hangs_holds_nothing_up_for_longer_than_ten_leases() -> None:
    async def main(chain: Chain) -> None:
        for beat in range(62):
            chain.board.listed([LeaseKey("z", beat, "j", 0, "0" * 16)])
            await chain.host.clock.sleep(TIMEOUTS.lease / 6)
            await chain.commit()
        assert chain.complete() == [0, 61, 62]

    chained(main)


def test_hints_are_rare_and_only_the_newest_stays() -> None:
    async def main(chain: Chain) -> None:
        for _ in range(20):
            await chain.commit()
            await chain.list()
            await chain.host.clock.sleep(1.0)
        hints = [int(key.rsplit("/", 1)[1]) // chain.run.fragments for key in chain.place.listed("live/heads/")]
        assert max(hints) == HEAD_HINT_SECONDS + 1 and len(hints) <= 2
        await chain.sweeper.hint(chain.head, force=True)
        await chain.list()
        await chain.commit()
        assert chain.place.listed("live/heads/") == [HeadKey(0, 20 * chain.run.fragments).path]

    chained(main)


def test_a_lost_commits_payloads_go_unless_the_winner_names_them() -> None:
    async def main(chain: Chain) -> None:
        ours, shared = chain.sections(2, void=False)
        for section in (ours, shared):
            await chain.place.mailbox.put(section.key, b"payload")
        await chain.sweeper.discard([ours, shared], keep=[shared])
        assert shared.key in chain.place.listed("blobs/") and ours.key not in chain.place.listed("blobs/")

    chained(main)


def orphan(round: int) -> str:
    return blob_key(round, "dead", f"{round:064x}")


def test_orphans_go_once_they_are_older_than_what_is_kept() -> None:
    async def main(chain: Chain) -> None:
        for _ in range(6):
            await chain.commit()
        await chain.commit(void=True)
        orphans = [orphan(round) for round in range(2, 20, chain.run.fragments)]
        first = blob_key(0, "dead", "0" * 64)
        strangers = {"blobs/strange", "blobs/0000000004x/a", "blobs/0000000004/notes"}
        for key in (*orphans, first, *strangers):
            await chain.place.mailbox.put(key, b"payload")
        await remove_orphans(chain.host, chain.run, chain.board)
        left = chain.place.listed("blobs/")
        assert [key for key in orphans if key in left] == [key for key in orphans if int(key.split("/")[1]) >= 12]
        assert {first, *strangers} <= set(left)
        assert chain.complete() == [0, 6, 7]

    chained(main)


def test_orphans_stay_while_a_record_of_their_fragment_is_not_found() -> None:
    async def main(chain: Chain) -> None:
        for version in range(1, 8):
            await chain.commit(void=3 < version < 7)
        assert chain.named[6] == chain.named[3]
        record = tape_key(6 * chain.run.fragments, 0)
        body = await chain.place.mailbox.get(record) or b""
        await chain.place.mailbox.delete(record)
        await remove_orphans(chain.host, chain.run, chain.board)
        await chain.place.mailbox.put(record, body)
        assert chain.held(6) and chain.held(7)

    chained(main)


def test_orphans_stay_while_a_node_joins() -> None:
    async def main(chain: Chain) -> None:
        for _ in range(6):
            await chain.commit()
        await chain.place.mailbox.put(orphan(2), b"payload")
        chain.board.listed([LeaseKey("z", 0, "j", 0, "0" * 16)])
        await remove_orphans(chain.host, chain.run, chain.board)
        assert orphan(2) in chain.place.listed("blobs/")

    chained(main)


def test_hints_of_slow_chains_are_as_rare_as_every_fourth_commit() -> None:
    async def main(chain: Chain) -> None:
        written = 0
        for _ in range(20):
            before = set(chain.place.listed("live/heads/"))
            await chain.commit()
            written += bool(set(chain.place.listed("live/heads/")) - before)
            await chain.list()
            await chain.host.clock.sleep(60.0)
        assert 5 <= written <= 6

    chained(main)


def test_much_that_was_kept_back_goes_in_little_time() -> None:
    """One request after the other would hold up the task that lists, until the others seem dead."""

    class Distant:
        def __init__(self, place: Place) -> None:
            self._place = place

        def __getattr__(self, name: str) -> Any:
            return getattr(self._place.mailbox, name)

        async def delete(self, key: str) -> None:
            await asyncio.sleep(1.0)
            await self._place.mailbox.delete(key)

    async def main(place: Place) -> None:
        run = await created(place.host())
        chain = Chain(place, place.host("b", Distant(place)), run)
        late = LeaseKey("late", 0, "j", 0, "0" * 16).path
        await place.mailbox.put(late, b"{}")
        await chain.list()
        for _ in range(20):
            await chain.commit()
        await place.mailbox.delete(late)
        await asyncio.sleep(2 * TIMEOUTS.lease)
        await chain.list()
        before = place.loop.time()
        await chain.sweeper.release()
        assert chain.complete() == [0, 19, 20]
        assert place.loop.time() - before < TIMEOUTS.lease

    virtually(main)
