"""Events as numbers: which metrics there are, and what each event adds to them.

Names, kinds and units are stable: dashboards are built on them. A *counter* only grows, by the event's value; a
*gauge* is the newest value; a *distribution* takes one sample for each event. All sinks of numbers draw from here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from gradientmail_core.events import (
    Disagreement,
    Event,
    FragmentAligned,
    HandoffSkipped,
    NodeAppeared,
    NodeGone,
    ObjectIgnored,
    PayloadSkipped,
    Rejoined,
    RoundCommitted,
    RoundLost,
    RoundMixed,
    RoundTakenOver,
    RunJoined,
    SnapshotPublished,
    SnapshotRefused,
    StoreStalled,
    TokensBooked,
)

Kind: TypeAlias = Literal["counter", "gauge", "distribution"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name below ``gradientmail.``, kind and unit, and what it says."""

    name: str
    kind: Kind
    unit: str
    description: str


METRICS: Final = (
    Metric("rounds.aligned", "counter", "{round}", "commits written into this node's model"),
    Metric("rounds.closed", "counter", "{round}", "rounds this node closed"),
    Metric("rounds.closing", "distribution", "s", "from the decision to close a round to its commit"),
    Metric("rounds.lost", "counter", "{round}", "rounds this node closed as well, but later than another"),
    Metric("rounds.taken_over", "counter", "{round}", "rounds closed in another node's place"),
    Metric("rounds.participants", "gauge", "{node}", "snapshots in the newest commit"),
    Metric("rounds.cosine", "gauge", "1", "mean pairwise cosine of the newest commit's snapshots"),
    Metric("step", "gauge", "{step}", "the run's clock at the newest commit, in optimizer steps"),
    Metric("snapshots.published", "counter", "{snapshot}", "snapshots of this node"),
    Metric("snapshots.refused", "counter", "{snapshot}", "of them, not merged; by reason"),
    Metric("snapshots.bytes", "counter", "By", "uploaded in snapshots"),
    Metric("snapshots.upload", "distribution", "s", "from the copy of a fragment to the end of its upload"),
    Metric("tokens.run", "counter", "{token}", "merged by everyone, each fragment counting for itself"),
    Metric("tokens.merged", "counter", "{token}", "of this node, merged; each fragment counting for itself"),
    Metric("tokens.dropped", "counter", "{token}", "of this node, dropped; by cause"),
    Metric("tokens.carried", "gauge", "{token}", "of this node, kept over the newest commit of a fragment"),
    Metric("nodes.appeared", "counter", "{node}", "other nodes seen alive for the first time, or again"),
    Metric("nodes.gone", "counter", "{node}", "other nodes that left or fell silent"),
    Metric("store.stalled", "gauge", "s", "how long the store had not answered when it was last reported"),
    Metric("store.ignored", "counter", "{object}", "objects that are not what their key says"),
    Metric("payloads.skipped", "counter", "{payload}", "committed payloads that nobody could read"),
    Metric("handoffs.skipped", "counter", "{handoff}", "hand-offs that this node could not go on from"),
    Metric("gossip.rounds", "counter", "{round}", "outer steps of this node in a gossip run"),
    Metric("gossip.partners", "gauge", "{node}", "partners whose gradients are in the newest outer step"),
    Metric("gossip.wait", "distribution", "s", "waited for gradients at a round's end"),
    Metric("gossip.rejoined", "counter", "{round}", "times this node was too far behind and went on from the mean"),
    Metric("gossip.apart.l2", "gauge", "1", "distance of the nodes from their mean"),
    Metric("gossip.apart.js", "gauge", "1", "Jensen-Shannon distance of the nodes' outputs"),
)
"""Every metric, in the order of the documentation."""

NAMED: Final[Mapping[str, Metric]] = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value for a metric; ``labels`` tell series of one metric apart."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def metric(self) -> Metric:
        """What it measures."""
        return NAMED[self.name]


def measured(event: Event) -> Iterator[Measurement]:
    """What an event says in numbers; nothing for one that is only told in words."""
    for name, value in _plain(event):
        if value is not None:
            yield Measurement(name, float(value))
    match event:
        case SnapshotRefused():
            yield Measurement("snapshots.refused", 1.0, {"reason": event.reason})
        case TokensBooked():
            yield Measurement("tokens.carried", float(event.carried), {"fragment": str(event.fragment)})
            for cause, tokens in event.dropped:
                yield Measurement("tokens.dropped", float(tokens), {"cause": cause})
        case _:
            pass


def _plain(event: Event) -> tuple[tuple[str, float | None], ...]:
    """Values without labels; None for what is not known."""
    match event:
        case FragmentAligned():
            return _aligned(event)
        case RunJoined():
            return (("step", event.step),)
        case RoundCommitted():
            return ("rounds.closed", 1), ("rounds.closing", event.seconds)
        case SnapshotPublished():
            return (
                ("snapshots.published", 1),
                ("snapshots.bytes", event.bytes),
                ("snapshots.upload", event.seconds),
            )
        case TokensBooked():
            return (("tokens.merged", event.merged),)
        case StoreStalled():
            return (("store.stalled", event.seconds),)
        case RoundMixed():
            return (
                ("gossip.rounds", 1),
                ("gossip.partners", len(event.partners)),
                ("gossip.wait", event.seconds),
                ("step", event.step),
            )
        case Disagreement():
            return ("gossip.apart.l2", event.l2), ("gossip.apart.js", event.js)
        case _:
            name = _COUNTED.get(type(event))
            return () if name is None else ((name, 1),)


_COUNTED: Final[Mapping[type, str]] = {
    RoundLost: "rounds.lost",
    RoundTakenOver: "rounds.taken_over",
    NodeAppeared: "nodes.appeared",
    NodeGone: "nodes.gone",
    ObjectIgnored: "store.ignored",
    PayloadSkipped: "payloads.skipped",
    HandoffSkipped: "handoffs.skipped",
    Rejoined: "gossip.rejoined",
}


def _aligned(event: FragmentAligned) -> tuple[tuple[str, float | None], ...]:
    return (
        ("rounds.aligned", 1),
        ("rounds.participants", event.participants),
        ("rounds.cosine", event.cosine),
        ("tokens.run", event.tokens),
        ("step", event.step),
    )
