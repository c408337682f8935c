"""The judge bites: with a rule of the protocol broken on purpose, the search finds a violation.

Each mutation is a switch of its own, thrown here only. The number beside it is where its search begins, so that the
tests take seconds; ``python -m tests.scenarios.test_mutations`` prints how many seeds each one takes from 0.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from gradientmail_core.algorithms.schedule import first_due_after
from gradientmail_core.engine import closer, closing, follower
from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.closer import Closer
from gradientmail_core.engine.run import Board
from gradientmail_core.engine.sweeping import Sweeper
from gradientmail_core.mailbox import Body, CreateOutcome, MemoryMailbox
from gradientmail_core.protocol import exchange
from gradientmail_core.protocol.exchange import Lost, Outcome, Won, create_once
from gradientmail_core.protocol.keys import LeaseKey, blob_round, tape_key
from gradientmail_core.protocol.leases import Roster
from gradientmail_core.protocol.records import RECORD_LONGEST
from gradientmail_core.sim.scenario import scenario
from gradientmail_core.sim.swarm import Verdict, play

SEEDS_MOST = 500
Switch = Callable[[pytest.MonkeyPatch], None]


def create_once_not_atomic(patch: pytest.MonkeyPatch) -> None:
    """Two creates of one key both succeed, and the later one stands."""
    honest = MemoryMailbox.create

    async def overwriting(self: MemoryMailbox, key: str, body: Body) -> CreateOutcome:
        if key.startswith(("probe/", "live/leases/")):  # where a store is tried before it is trusted
            return await honest(self, key, body)
        await self.put(key, body)
        return CreateOutcome.CREATED

    patch.setattr(MemoryMailbox, "create", overwriting)


def commits_deleted_after_two_cycles(patch: pytest.MonkeyPatch) -> None:
    """A version's record goes with its payloads."""
    obsolete = Sweeper._obsolete_parameters

    async def with_the_record(self: Sweeper, head: Head) -> set[str]:
        round = (head.version - 2) * self._run.fragments + head.fragment
        return {*await obsolete(self, head), *([tape_key(round, 0)] if head.version > 2 else [])}

    patch.setattr(Sweeper, "_obsolete_parameters", with_the_record)


def sweeping_by_round_number(patch: pytest.MonkeyPatch) -> None:
    """Payloads of any fragment go once their round is two cycles below the newest commit's."""
    obsolete = Sweeper._obsolete_parameters

    async def by_round(self: Sweeper, head: Head) -> set[str]:
        swept = (head.version - 2) * self._run.fragments + head.fragment
        initial = {section.key for section in self._run.manifest.theta}
        keys = [entry.key async for entry in self._host.mailbox.list("blobs/")]
        old = {key for key in keys if (blob_round(key) or 0) <= swept and key not in initial}
        return old | await obsolete(self, head)

    patch.setattr(Sweeper, "_obsolete_parameters", by_round)


def mine_by_node_and_incarnation(patch: pytest.MonkeyPatch) -> None:
    """A record at the key counts as this attempt's if its writer has this node's name; incarnations are not drawn anew.

    What identifies a writer is then its node and an incarnation that a restart keeps, as a machine id or a rank would.
    """

    async def by_name(mailbox: Any, clock: Any, key: str, body: bytes, limit: int = RECORD_LONGEST) -> Outcome:
        outcome = await create_once(mailbox, clock, key, body, limit)
        if isinstance(outcome, Lost) and _writer(outcome.body) == _writer(body):
            return Won()
        return outcome

    patch.setattr(exchange, "create_once", by_name)


def _writer(body: bytes) -> object:
    try:
        record = json.loads(body)
    except ValueError:
        return body
    return record.get("node", body) if isinstance(record, dict) else body


def no_slots(patch: pytest.MonkeyPatch) -> None:
    """Only slot 0 may decide a round."""
    patch.setattr(exchange, "SLOTS_MOST", 1)


def no_void_rounds(patch: pytest.MonkeyPatch) -> None:
    """A round in which nothing was accepted waits for better snapshots."""
    merged = Closer._merged

    async def something(self: Closer, gathering: Any) -> Any:
        while (result := await merged(self, gathering)) is None:
            await self._host.clock.sleep(1.0)
        return result

    patch.setattr(Closer, "_merged", something)


def missed_cycles_made_up(patch: pytest.MonkeyPatch) -> None:
    """The next round is due one cycle after this one was, however late this one closed."""
    record = closing.round_record

    def one_by_one(host: Any, run: Any, head: Any, **rest: Any) -> Any:
        made = record(host, run, head, **rest)
        due = first_due_after(made.step, head.fragment, run.fragments, run.settings.sync_every)
        return replace(made, next_step=due)

    patch.setattr(closer, "round_record", one_by_one)


def vanished_lease_taken_as_left(patch: pytest.MonkeyPatch) -> None:
    """Who is not in a listing has left."""
    listed = Board.listed

    def absent_left(self: Board, keys: Any) -> None:
        keys = list(keys)
        seen = {key.node for key in keys if isinstance(key, LeaseKey)} | {self.host.node}
        gone = {
            node: replace(presence, lease=replace(presence.lease, state="x"))
            for node, presence in self.roster.nodes.items()
            if node not in seen
        }
        self.roster = Roster.of({**self.roster.nodes, **gone})
        listed(self, keys)

    patch.setattr(Board, "listed", absent_left)


def refused_snapshot_merged(patch: pytest.MonkeyPatch) -> None:
    """A snapshot with a trained step is merged, whatever else its record says."""
    reason = closing._reason_against

    def lenient(record: Any, payload: Any, node: str, round: int, head: Head) -> Any:
        return reason(record, payload, node, round, head) if record.steps == 0 else None

    patch.setattr(closing, "_reason_against", lenient)


def joiners_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """Payloads are swept although a node is loading them."""
    patch.setattr(Board, "joining", lambda self: False)


def every_question_asked_ten_times(patch: pytest.MonkeyPatch) -> None:
    """A follower asks ten times where once would do."""
    ask = exchange.read_round

    async def again_and_again(mailbox: Any, run: str, round: int) -> Any:
        for _ in range(9):
            await ask(mailbox, run, round)
        return await ask(mailbox, run, round)

    patch.setattr(follower, "read_round", again_and_again)


def closed_rounds_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Snapshots and claims of closed rounds stay."""
    patch.setattr(Sweeper, "_collect", lambda self, fragment: None)


def more_digits_kept_than_stored(patch: pytest.MonkeyPatch) -> None:
    """A closer goes on from its own fp32 results, whatever formats it stores."""
    patch.setattr(closing, "restated", lambda values, codec: None)


MUTATIONS: Mapping[Switch, int] = {
    create_once_not_atomic: 0,
    commits_deleted_after_two_cycles: 0,
    sweeping_by_round_number: 3,
    mine_by_node_and_incarnation: 0,
    no_slots: 13,
    no_void_rounds: 15,
    missed_cycles_made_up: 0,
    vanished_lease_taken_as_left: 0,
    refused_snapshot_merged: 6,
    joiners_not_pinned: 22,
    every_question_asked_ten_times: 0,
    closed_rounds_left_behind: 0,
    more_digits_kept_than_stored: 0,
}


def search(switch: Switch, first: int, most: int) -> Iterator[Verdict]:
    """Verdicts with the mutation on, until one finds a violation."""
    with pytest.MonkeyPatch.context() as patch:
        switch(patch)
        for seed in range(first, first + most):
            verdict = play(scenario(seed))
            yield verdict
            if verdict.violations:
                return


@pytest.mark.parametrize("switch", MUTATIONS, ids=lambda switch: switch.__name__)
def test_mutation_is_found(switch: Switch) -> None:
    verdicts = list(search(switch, MUTATIONS[switch], 40))
    assert verdicts[-1].violations, f"{len(verdicts)} seeds from {MUTATIONS[switch]} saw nothing"


def main() -> None:
    """Print for each mutation how many seeds from 0 it takes, and what was seen."""
    chosen = [switch for switch in MUTATIONS if switch.__name__ in sys.argv[1:] or len(sys.argv) == 1]
    for switch in chosen:
        verdicts = list(search(switch, 0, SEEDS_MOST))
        print(switch.__name__, len(verdicts), verdicts[-1].violations[:2], flush=True)


if __name__ == "__main__":
    main()
