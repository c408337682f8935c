"""How a run is doing, as values: what :mod:`gradientmail_core.engine.survey` read, in the terms of who asks.

A DiLoCo run is told by its records, a gossip run by its rosters and means; both come to the same report.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from gradientmail_core.engine.run import Host
from gradientmail_core.engine.survey import RECENT_ROUNDS, Mixing, Survey, bytes_by_kind, surveyed
from gradientmail_core.protocol.exchange import bounded_get
from gradientmail_core.protocol.keys import LeaseState
from gradientmail_core.protocol.leases import LEARNING, LEASE_LONGEST, TRAINING, framework_in

FRAMEWORKS_ASKED = 32  # nodes of which the framework is read, one request each


@dataclass(frozen=True, slots=True)
class Node:
    """A node. ``age`` is that of its last sign of life, ``tokens`` are those of its newest merged snapshot.

    ``step`` is its own count at its newest beat, or the step of the newest round it was merged in, if that is more.
    """

    name: str
    state: LeaseState
    step: int
    age: float | None
    lives: bool
    tokens: int | None = None
    framework: str = ""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fragment's newest version (in a gossip run: the round of its newest mean), and its age in seconds."""

    version: int
    age: float | None


@dataclass(frozen=True, slots=True)
class Round:
    """What became of a round: who was merged with how many steps (0: not told), who was refused and why."""

    round: int
    fragment: int
    step: int
    participants: tuple[tuple[str, int], ...]
    refusals: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything about a run that its mailbox tells. ``tokens`` are all that was merged, ``stored`` bytes by kind."""

    run: str
    url: str
    settings: Mapping[str, object]
    parameters: int
    unit: str
    nodes: tuple[Node, ...]
    fragments: tuple[Fragment, ...]
    rounds: tuple[Round, ...]
    tokens: int
    stored: Mapping[str, int]

    @property
    def verdict(self) -> str:
        """The report in one line."""
        training = [node for node in self.nodes if node.lives and node.state in TRAINING]
        newest = max((fragment.version for fragment in self.fragments), default=0)
        ages = [each.age for each in self.fragments if each.version == newest and each.age is not None]
        when = f", {age_text(min(ages))}" if newest and ages else ""
        reached = f"{self.unit} {newest}{when}" if newest else f"no {self.unit} yet"
        if training:
            return f"training: {_nodes(training)}, {reached}"
        waiting = [node for node in self.nodes if node.lives and node.state in LEARNING | {"j"}]
        if waiting:
            return f"waiting: {_nodes(waiting)} about to train, {reached}"
        paused = [node for node in self.nodes if node.lives and node.state in ("e", "p")]
        if paused:
            return f"paused: {_nodes(paused)} between steps, such as in evaluation, {reached}"
        return f"nobody is training: {reached}"

    def as_json(self) -> dict[str, object]:
        """Everything, of plain types."""
        return {**asdict(self), "verdict": self.verdict}


async def reported(host: Host, now: float, lease_timeout: float) -> Report | None:
    """The report on the run at the host's mailbox, None if there is none. ``now`` as in :func:`surveyed`."""
    survey = await surveyed(host, now)
    if survey is None:
        return None
    mixing = survey.mixing
    nodes = tuple(_nodes_of(survey, lease_timeout))
    return Report(
        run=survey.found.manifest.run,
        url=survey.url,
        settings=dict(survey.found.manifest.algorithm),
        parameters=sum(layout.size for layout in survey.found.layouts),
        unit="version" if mixing is None else "mean of round",
        nodes=await _with_frameworks(host, survey, nodes),
        fragments=tuple(_fragments(survey)),
        rounds=tuple(_rounds(survey) if mixing is None else _mixed(mixing, survey)),
        tokens=_tokens(survey),
        stored=bytes_by_kind(survey),
    )


def age_text(seconds: float | None) -> str:
    """How long ago something was, as people say it."""
    if seconds is None:
        return "at an unknown time"
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _nodes(nodes: Sequence[Node]) -> str:
    return "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"


def _nodes_of(survey: Survey, lease_timeout: float) -> Iterator[Node]:
    tokens, merged = dict[str, int](), dict[str, int]()
    records = [record for chain in survey.chains for record in chain.records]
    for record in sorted(records, key=lambda record: record.newest_step):
        tokens.update({each.node: each.tokens for each in record.participants})
        merged.update({each.node: record.step for each in record.participants})
    for name, presence in survey.presences.items():
        lease, lives = presence.lease, presence.lives(lease_timeout)
        yield Node(name, lease.state, max(lease.step, merged.get(name, 0)), presence.age, lives, tokens.get(name))


async def _with_frameworks(host: Host, survey: Survey, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with what those train with that live, which their beats' objects tell."""
    asked = [node.name for node in nodes if node.lives][:FRAMEWORKS_ASKED]
    paths = [survey.presences[name].lease.path for name in asked]
    bodies = await asyncio.gather(*(bounded_get(host.mailbox, path, LEASE_LONGEST) for path in paths))
    found = {name: framework_in(body or b"") for name, body in zip(asked, bodies, strict=True)}
    return tuple(replace(node, framework=found.get(node.name, "")) for node in nodes)


def _fragments(survey: Survey) -> Iterator[Fragment]:
    if survey.mixing is None:
        yield from (Fragment(chain.version, chain.age) for chain in survey.chains)
    else:
        yield from (Fragment(mean.round if mean else 0, age) for mean, age in survey.mixing.means)


def _rounds(survey: Survey) -> list[Round]:
    """The newest records of all chains, newest step first."""
    records = [record for chain in survey.chains for record in chain.records]
    records.sort(key=lambda record: (record.newest_step, record.round), reverse=True)
    return [
        Round(
            record.round,
            record.round % survey.fragments,
            record.step,
            tuple((each.node, each.steps) for each in record.participants),
            tuple((each.node, each.reason) for each in record.refusals),
        )
        for record in records[:RECENT_ROUNDS]
    ]


def _mixed(mixing: Mixing, survey: Survey) -> Iterator[Round]:
    """The newest mean of each fragment; a gossip run keeps no record of rounds before."""
    sync_every = survey.found.manifest.algorithm.get("sync_every")
    for fragment, (mean, _) in enumerate(mixing.means):
        if mean is not None:
            step = mean.round * sync_every if isinstance(sync_every, int) else 0
            yield Round(mean.round, fragment, step, tuple((node, 0) for node in mean.participants), ())


def _tokens(survey: Survey) -> int:
    """What was merged in all: that of the chain, or mean, which has most."""
    merged = [chain.records[0].merged_tokens for chain in survey.chains if chain.records]
    means = [mean.tokens for mean, _ in survey.mixing.means if mean] if survey.mixing else []
    return max([*merged, *means], default=0)
