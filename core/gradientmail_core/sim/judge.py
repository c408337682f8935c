"""The invariants of a run, checked while it is played and at its end.

1. One content per round is ever acted on, and each chain is linked without a gap.
2. The two newest versions of every fragment are complete, at any moment.
3. In calm weather every fragment commits within ``lease + 5 s`` and two cycles while a node lives.
4. A snapshot is in at most one record and only if it may be: trained at least a step from the very record that its
   round follows, under its own name. Its steps and tokens are counted as they were trained, and once; or it was
   reported lost (:mod:`gradientmail_core.sim.ledger`). A round's weights add up to one, and its tokens to the chain's.
5. ``live/`` and ``blobs/`` are within their bounds in the calm, and nothing of a closed round is left
   (:mod:`gradientmail_core.sim.bounds`).
6. In the calm requests stay in their budget (likewise).
7. A seed gives one tape (:mod:`gradientmail_core.sim.search` plays some twice).
8. After faults stop all nodes agree, and what the store gives back is what each of them goes on from, in bytes
   (:mod:`gradientmail_core.sim.agreement`). Every node that left holds the committed bytes of the versions it names.
9. A round is due after every step its closer knew of: missed cycles are not made up.
10. No node fails. Nobody is taken to have left who has not.
11. Nothing that a joiner may be loading is removed (:mod:`gradientmail_core.sim.pins`).
12. Every token a node processed is merged, in flight, carried or dropped by its own ledger, and the tape agrees.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.schedule import first_due_after
from gradientmail_core.engine.learner import Commit, Snapshot
from gradientmail_core.engine.loading import Source, parameters
from gradientmail_core.events import Event, NodeGone, RoundTakenOver, SnapshotRefused
from gradientmail_core.mailbox.memory import MemoryMailbox
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import MANIFEST, DeltaKey, parse_live, tape_key
from gradientmail_core.protocol.plan import manifest_layouts
from gradientmail_core.protocol.records import Participant, RoundRecord, Section, digest
from gradientmail_core.sim.accounts import imbalances
from gradientmail_core.sim.agreement import behind, differing, fragments_of, strangers
from gradientmail_core.sim.bounds import UNPINNED_SECONDS, Found, Stretch, allowed, crowded, overspent
from gradientmail_core.sim.checks import forks, manifest_of, tape
from gradientmail_core.sim.ledger import Claim, Life, miscounted, unreported
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop
from gradientmail_core.sim.pins import Pins
from gradientmail_core.sim.stage import Stage
from gradientmail_core.sim.store import Traffic
from gradientmail_core.sim.world import SimulatedNode

WATCH_SECONDS = 5.0
CALM_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Written:
    """A snapshot as it was seen to be written: its key, and what its record claims."""

    key: DeltaKey
    node: str
    round: int
    base: str


class Judge:
    """Collects what every node wrote, acted on and said, and compares it with the store."""

    def __init__(self, settings: DiLoCo, loop: VirtualLoop, shared: MemoryMailbox | None = None) -> None:
        self._shared = shared or MemoryMailbox("judged")
        self._settings = settings
        self._clock = VirtualClock(loop)
        self._acted: dict[tuple[int, int], str] = {}
        self._written: dict[str, list[Written]] = {}
        self._claims: dict[tuple[Life, int], Claim] = {}
        self._lives: list[SimulatedNode] = []
        self._compared: set[tuple[str, str]] = set()
        self._times: dict[str, float] = {}
        self._pins = Pins(settings.fragments)
        self.may_leave = False
        self.violations: list[str] = []

    def watches(self, shared: MemoryMailbox) -> None:
        """Look at this store."""
        self._shared = shared

    def born(self, node: SimulatedNode) -> None:
        """A life begins."""
        self._lives.append(node)
        node.on_commit = self.applied
        node.on_snapshot = lambda snapshot: self.took(node, snapshot)

    def took(self, node: SimulatedNode, snapshot: Snapshot) -> None:
        """A trainer took a snapshot."""
        round = (snapshot.version + 1) * self._fragments + snapshot.fragment
        claim = Claim(snapshot.local_step, snapshot.steps, snapshot.tokens)
        self._claims[Life(node.name, node.incarnation), round] = claim

    def wrote(self, key: str, body: bytes) -> None:
        """An object appeared in the store, or was replaced."""
        self._times[key] = now = self._clock.now()
        self._pins.wrote(key, body, now)
        if key.startswith("live/deltas/") and isinstance(parsed := parse_live(key), DeltaKey):
            text = _snapshot_text(body)
            if text is not None:
                record = json.loads(text)
                written = Written(parsed, record["node"], record["round"], record["base"])
                self._written.setdefault(digest(text), []).append(written)

    def removing(self, key: str) -> None:
        """A node decided to remove an object."""
        wrong = self._pins.broken(key, self._clock.now())
        if wrong is not None:
            self.violated(wrong)

    def heard(self, event: Event) -> None:
        """A node said something. Until :attr:`may_leave`, nobody leaves."""
        match event:
            case NodeGone(node=node, left=True) | RoundTakenOver(closer=node, reason="it left"):
                if not self.may_leave:
                    self.violated(f"{node} was taken to have left and has not")
            case _:
                pass

    def violated(self, what: str) -> None:
        """Note a violation, once."""
        if what not in self.violations:
            self.violations.append(what)

    def applied(self, commit: Commit) -> None:
        """A node wrote a commit into its model."""
        head = commit.head
        content = head.digest + hashlib.sha256(commit.theta.tobytes()).hexdigest()
        key = (head.fragment, head.version)
        if self._acted.setdefault(key, content) != content:
            self.violated(f"two contents of fragment {head.fragment} version {head.version} were acted on")

    async def watch(self) -> None:
        """Check completeness every few seconds, and that nodes go on from what is stored."""
        while True:
            await self._clock.sleep(WATCH_SECONDS)
            await self._check_complete()
            await self._check_stored()

    async def calm(self, stage: Stage, seconds: float, lingers: bool) -> None:
        """Without faults every fragment must commit within ``seconds``, and again within as many more.

        Each time every node must have come as far as the tape was before, and the second time requests must stay in
        their budget. Ends once all have, unless it ``lingers`` to see what comes late.
        """
        calm_since = self._clock.now()
        for time in range(2):
            began, asked = self._clock.now(), stage.traffic
            before = await self._versions()
            waiting, late, after = set(before), list(behind(stage.living(), before)), before
            while self._clock.now() < began + seconds and (waiting or late or lingers):
                await self._clock.sleep(CALM_LOOK_SECONDS)
                after = await self._versions()
                waiting = {fragment for fragment in waiting if after[fragment] <= before[fragment]}
                late = list(behind(stage.living(), before))
            for fragment in sorted(waiting):
                self.violated(f"fragment {fragment} did not commit for {seconds:.0f} s of calm")
            for node, fragment in late:
                self.violated(f"{node} did not follow fragment {fragment} for {seconds:.0f} s of calm")
            if time:
                rounds = sum((after - before).values())
                self._check_budget(stage, self._clock.now() - began, rounds, stage.traffic - asked)
        await self._check_size(stage, self._clock.now() - calm_since)
        for stranger in strangers(stage.living(), await self._tape()):
            self.violated(stranger)

    async def _versions(self) -> Counter[int]:
        """Committed versions of each fragment."""
        versions = Counter(dict.fromkeys(range(self._fragments), 0))
        versions.update(record.round % self._fragments for record in await self._tape())
        return versions

    async def conclude(self) -> None:
        """Judge the whole tape, every life and every model."""
        for node in self._lives:
            self._check_life(node)
        if not await self._created():
            return self.violated("no run was created")
        for round in await forks(self._shared):
            self.violated(f"round {round} does not follow its predecessor")
        await self._check_complete()
        await self._check_stored()
        records = await self._tape()
        for what in miscounted(records, self._claims, self._fragments):
            self.violated(what)
        for record in records:
            self._check_schedule(record)
            for participant in record.participants:
                self._check_participant(record, participant)
        for node in self._lives:
            for wrong in imbalances(node, records, self._fragments):
                self.violated(wrong)
            if _left(node):
                told = {event.round for _, event in node.events if isinstance(event, SnapshotRefused)}
                for what in unreported(Life(node.name, node.incarnation), self._claims, records, told):
                    self.violated(what)
                await self._check_model(node, records)

    async def tape_digest(self) -> str:
        """One digest for all committed records."""
        return digest("".join(digest(record.encoded()) for record in await self._tape()))

    async def rounds(self) -> int:
        """Committed rounds."""
        return len(await self._tape())

    @property
    def _fragments(self) -> int:
        return self._settings.fragments

    async def _created(self) -> bool:
        return await self._shared.get(MANIFEST) is not None

    async def _tape(self) -> list[RoundRecord]:
        return await tape(self._shared) if await self._created() else []

    async def _sources(self) -> list[Source]:
        """Where each fragment's versions are read from; none before the run is created."""
        if not await self._created():
            return []
        manifest, _ = await manifest_of(self._shared)
        layouts = manifest_layouts(manifest)
        assert not isinstance(layouts, Rejected)
        return [Source(self._shared, self._clock, manifest, layout) for layout in layouts]

    async def _check_complete(self) -> None:
        sources = await self._sources()
        chains: list[list[tuple[Section, ...]]] = [
            [(section,)] for source in sources[:1] for section in source.manifest.theta
        ]
        for record in await self._tape():
            chains[record.round % self._fragments].append(record.sections)
        for source, chain in zip(sources, chains, strict=True):
            for version in range(max(len(chain) - 2, 0), len(chain)):
                present = [await self._shared.get(section.key) is not None for section in chain[version]]
                if not all(present) or isinstance(await parameters(source, version, chain[version]), Rejected):
                    self.violated(f"fragment {source.layout.fragment} misses a payload of its two newest versions")

    async def _check_stored(self) -> None:
        """Whoever lives goes on from what a node would read that came now. Each head is compared once."""
        for source in await self._sources():
            for node in self._lives:
                heads = [fragment.head for fragment in fragments_of(node)[source.layout.fragment :][:1]]
                for head in heads if not _dead(node) else ():
                    if (node.incarnation, head.digest) not in self._compared:
                        self._compared.add((node.incarnation, head.digest))
                        async for difference in differing(node, source):
                            self.violated(difference)

    async def _check_size(self, stage: Stage, seconds: float) -> None:
        keys = [entry.key async for entry in self._shared.list("")]
        records = await self._tape()
        found = Found(
            ages={key: self._age(key, seconds) for key in keys},
            settings=self._settings,
            living=[node.name for node in stage.living()],
            lives=stage.lives,
            closed={record.round: self._age(tape_key(record.round, 0), seconds) for record in records},
            pinned=self._pinned(records),
        )
        for what in crowded(found):
            self.violated(what)

    def _pinned(self, records: Sequence[RoundRecord]) -> Counter[int]:
        """Each fragment's rounds that closed since the first of those began to join who did until lately."""
        since = self._pins.joining_since(self._clock.now() - UNPINNED_SECONDS)
        closed = [record.round for record in records if self._times.get(tape_key(record.round, 0), 0.0) >= since]
        return Counter(round % self._fragments for round in closed)

    def _age(self, key: str, most: float) -> float:
        return min(self._clock.now() - self._times.get(key, 0.0), most)

    def _check_budget(self, stage: Stage, seconds: float, rounds: int, asked: Traffic) -> None:
        living, counting = stage.living(), self._settings.follow not in (None, False)
        period = min((node.timeouts.period for node in living), default=1.0)
        standing = self._settings.overlap_steps is not None
        calm = Stretch(seconds, period, len(living), rounds, self._fragments, counting, standing)
        for what in overspent(asked, allowed(calm)):
            self.violated(what)

    def _check_life(self, node: SimulatedNode) -> None:
        task = node.task
        if task is not None and task.done() and not task.cancelled() and task.exception() is not None:
            self.violated(f"{node.name} failed: {task.exception()!r}")

    def _check_participant(self, record: RoundRecord, participant: Participant) -> None:
        who = f"{participant.node}'s snapshot in round {record.round}"
        for written in self._written.get(participant.snapshot, ())[:1]:
            if (written.node, written.round) != (participant.node, record.round):
                self.violated(f"{who} is {written.node}'s of round {written.round}")
            if written.base != record.prev:
                self.violated(f"{who} was trained from another record")

    def _check_schedule(self, record: RoundRecord) -> None:
        """The next round is due at the first grid step after all that the closer knew of."""
        newest, fragment = max(record.step, record.newest_step), record.round % self._fragments
        if record.next_step != first_due_after(newest, fragment, self._fragments, self._settings.sync_every):
            self.violated(f"round {record.round}, closed at step {newest}, makes the next due at {record.next_step}")

    async def _check_model(self, node: SimulatedNode, records: Sequence[RoundRecord]) -> None:
        assert node.learner is not None
        by_round = {record.round: record for record in records}
        for source, track in zip(await self._sources(), node.learner.state.tracks, strict=True):
            layout = source.layout
            record = by_round.get(track.version * self._fragments + layout.fragment)
            if record is None:
                continue
            committed = await parameters(source, track.version, record.sections)
            mine = np.empty(layout.size, np.float32)
            node.model.read(layout, mine)
            if not isinstance(committed, Rejected) and mine.tobytes() != committed.tobytes():
                self.violated(f"{node.name} left with other parameters than fragment {layout.fragment}'s commit")


def _left(node: SimulatedNode) -> bool:
    """True if this life ended as it should."""
    task = node.task
    return task is not None and task.done() and not task.cancelled() and task.exception() is None


def _dead(node: SimulatedNode) -> bool:
    """True if this life was ended from outside, or by a failure."""
    task = node.task
    return task is not None and task.done() and not _left(node)


def _snapshot_text(body: bytes) -> str | None:
    """A snapshot's record as it stands in its payload's header, None for what is none."""
    try:
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        text = header["__metadata__"]["gradientmail"]
    except (ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) else None
