"""The invariants of a run, checked while it is played and at its end.

1. One content per round is ever acted on, and each chain is linked without a gap.
2. The two newest versions of every fragment are complete, at any moment.
3. In calm weather every fragment commits within ``lease + 5 s`` and two cycles while a node lives.
4. A snapshot is in at most one record, and a round's weights add up to one.
5. ``live/`` is within its bound in the calm.
6. Every node that left holds the committed bytes of the versions it names.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.learner import Commit
from gradientmail_core.engine.loading import Source, parameters
from gradientmail_core.mailbox.memory import MemoryMailbox
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import MANIFEST
from gradientmail_core.protocol.plan import manifest_layouts
from gradientmail_core.protocol.records import RoundRecord, Section
from gradientmail_core.sim.checks import forks, manifest_of, tape
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop
from gradientmail_core.sim.world import SimulatedNode

WATCH_SECONDS = 5.0
CALM_LOOK_SECONDS = 1.0
SLACK_SECONDS = 5.0


class Judge:
    """Collects what every node acted on, and compares it with the store."""

    def __init__(self, shared: MemoryMailbox, settings: DiLoCo, loop: VirtualLoop) -> None:
        self._shared = shared
        self._settings = settings
        self._clock = VirtualClock(loop)
        self._acted: dict[tuple[int, int], str] = {}
        self.violations: list[str] = []

    def applied(self, commit: Commit) -> None:
        """A node wrote a commit into its model."""
        head = commit.head
        content = head.digest + hashlib.sha256(commit.theta.tobytes()).hexdigest()
        key = (head.fragment, head.version)
        if self._acted.setdefault(key, content) != content:
            self._violated(f"two contents of fragment {head.fragment} version {head.version} were acted on")

    async def watch(self) -> None:
        """Check completeness every few seconds."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self._check_complete()

    async def calm(self, living: Sequence[SimulatedNode], seconds: float, lingers: bool) -> None:
        """Without faults every fragment must commit within ``seconds``, and again within as many more.

        Ends once they have, unless it ``lingers`` to see what comes late.
        """
        for _ in range(2):
            ends_at = self._clock.now() + seconds
            before = await self._versions()
            waiting = set(range(self._fragments))
            while self._clock.now() < ends_at and (waiting or lingers):
                await self._clock.sleep(CALM_LOOK_SECONDS)
                after = await self._versions()
                waiting = {fragment for fragment in waiting if after[fragment] <= before[fragment]}
            for fragment in sorted(waiting):
                self._violated(f"fragment {fragment} did not commit for {seconds:.0f} s of calm")
        await self._check_live(len(living))

    async def _versions(self) -> Counter[int]:
        return Counter(record.round % self._fragments for record in await self._tape())

    async def conclude(self, nodes: Sequence[SimulatedNode]) -> None:
        """Judge the whole tape and every model."""
        if not await self._created():
            return self._violated("no run was created")
        for round in await forks(self._shared):
            self._violated(f"round {round} does not follow its predecessor")
        await self._check_complete()
        records = await self._tape()
        self._check_counted_once(records)
        for node in nodes:
            await self._check_model(node, records)

    async def rounds(self) -> int:
        """Committed rounds."""
        return len(await self._tape())

    @property
    def _fragments(self) -> int:
        return self._settings.fragments

    def _violated(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)

    async def _created(self) -> bool:
        return await self._shared.get(MANIFEST) is not None

    async def _tape(self) -> list[RoundRecord]:
        return await tape(self._shared) if await self._created() else []

    async def _check_complete(self) -> None:
        if not await self._created():
            return
        manifest, _ = await manifest_of(self._shared)
        layouts = manifest_layouts(manifest)
        assert not isinstance(layouts, Rejected)
        chains: list[list[tuple[Section, ...]]] = [[(section,)] for section in manifest.theta]
        for record in await self._tape():
            chains[record.round % self._fragments].append(record.sections)
        for layout, chain in zip(layouts, chains, strict=True):
            source = Source(self._shared, self._clock, manifest, layout)
            for version in range(max(len(chain) - 2, 0), len(chain)):
                present = [await self._shared.get(section.key) is not None for section in chain[version]]
                if not all(present) or isinstance(await parameters(source, version, chain[version]), Rejected):
                    self._violated(f"fragment {layout.fragment} misses a payload of its two newest versions")

    async def _check_live(self, living: int) -> None:
        deltas = [entry async for entry in self._shared.list("live/deltas/")]
        bound = (2 + self._settings.in_flight) * max(living, 1) * 2 + 16
        if len(deltas) > bound + 8 * self._fragments:
            self._violated(f"{len(deltas)} snapshots lie under live/, the bound is {bound}")

    def _check_counted_once(self, records: Sequence[RoundRecord]) -> None:
        merged = [participant.snapshot for record in records for participant in record.participants]
        for snapshot, times in Counter(merged).items():
            if times > 1:
                self._violated(f"snapshot {snapshot[:8]} was merged {times} times")
        for record in records:
            total = sum(participant.weight for participant in record.participants)
            if record.participants and not np.isclose(total, 1.0):
                self._violated(f"the weights of round {record.round} add up to {total}")

    async def _check_model(self, node: SimulatedNode, records: Sequence[RoundRecord]) -> None:
        if node.learner is None or node.task is None or not node.task.done() or node.task.cancelled():
            return
        if node.task.exception() is not None:
            return
        manifest, _ = await manifest_of(self._shared)
        layouts = manifest_layouts(manifest)
        assert not isinstance(layouts, Rejected)
        by_round = {record.round: record for record in records}
        for layout, track in zip(layouts, node.learner.state.tracks, strict=True):
            record = by_round.get(track.version * self._fragments + layout.fragment)
            if record is None:
                continue
            source = Source(self._shared, self._clock, manifest, layout)
            committed = await parameters(source, track.version, record.sections)
            mine = np.empty(layout.size, np.float32)
            node.model.read(layout, mine)
            if not isinstance(committed, Rejected) and mine.tobytes() != committed.tobytes():
                self._violated(f"{node.name} left with other parameters than fragment {layout.fragment}'s commit")
