"""What may lie in the store, and what may be asked of it, once faults have stopped.

A run that leaks shows it here: an object of a closed round that nobody removes, payloads that add up, a node that
remembers what it can forget, questions that come too often. Bounds follow from the protocol's rules (one beat and one
listing in a beat period, ``N + 2`` writes a round and a record, questions at growing gaps) with the slack that a
takeover or a late write needs; an object or a question too many *per round* or *per second* goes over any slack.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.protocol.keys import ClaimKey, DeltaKey, HeadKey, LeaseKey, LiveKey, blob_round, parse_live
from gradientmail_core.sim.store import Traffic

BEATS_KEPT = 2
HINTS_KEPT = 2
SECTIONS_MOST = 4
OPEN_VERSIONS = 2
SWEPT_SECONDS = 10.0
UNPINNED_SECONDS = 26.0
QUESTIONS_AT_ONCE = 60
QUESTIONS_PER_ROUND = 8
QUESTIONS_PER_ROUND_STANDING = 8
QUESTIONS_PER_SECOND = 2


@dataclass(frozen=True, slots=True)
class Found:
    """What lies in the store once faults have stopped: keys with their age, the calm counting at most.

    ``living`` are nodes by name, ``lives`` the processes there ever were; ``closed`` gives each committed round's age.
    ``pinned`` counts each fragment's rounds that closed since a node began to join of which a beat of joining is no
    older than :data:`UNPINNED_SECONDS`: what two leases, a listing and the removals take.
    """

    ages: Mapping[str, float]
    settings: DiLoCo
    living: Collection[str]
    lives: int
    closed: Mapping[int, float]
    pinned: Mapping[int, int] = field(default_factory=dict)


def crowded(found: Found) -> Iterator[str]:
    """What should be gone by now, or is more than there may be."""
    for key, age in found.ages.items():
        if age >= SWEPT_SECONDS and _is_over(parse_live(key), found):
            yield f"{key} of a closed round is still there"
    yield from _many_beats(found)
    hints = sum(isinstance(parse_live(key), HeadKey) for key in found.ages)
    if hints > HINTS_KEPT * found.settings.fragments + found.lives:
        yield f"{hints} hints lie under live/"
    payloads = Counter(round % found.settings.fragments for key in found.ages if (round := blob_round(key)) is not None)
    for fragment, count in sorted(payloads.items()):
        versions = (OPEN_VERSIONS + 1) * found.settings.full_every + 1 + found.pinned.get(fragment, 0)
        kept = SECTIONS_MOST * (versions + found.lives)
        if count > kept:
            yield f"{count} payloads of fragment {fragment} lie under blobs/, the bound is {kept}"


def _is_over(key: LiveKey | None, found: Found) -> bool:
    """True for a snapshot or a claim of a round that two versions have followed, the second some time ago.

    What a closer leaves that dies while it sweeps waits for a living one, and the first versions after may still name
    the dead one.
    """
    if not isinstance(key, DeltaKey | ClaimKey):
        return False
    version, fragments = key.round // found.settings.fragments, found.settings.fragments
    return version > 0 and found.closed.get(key.round + OPEN_VERSIONS * fragments, 0.0) >= SWEPT_SECONDS


def _many_beats(found: Found) -> Iterator[str]:
    """Nodes that leave more than their newest beats lying about."""
    beats = Counter(
        key.node
        for path, age in found.ages.items()
        if isinstance(key := parse_live(path), LeaseKey) and key.node in found.living and age >= SWEPT_SECONDS
    )
    for node, count in beats.items():
        if count > BEATS_KEPT:
            yield f"{count} old beats of {node} lie under live/"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of calm: its seconds, beat period and living nodes, and the rounds committed in it.

    ``counting`` says that nodes list who has published before they do (``follow=n``), ``standing`` that they train only
    so many steps before they wait for a commit (``overlap_steps``).
    """

    seconds: float
    period: float
    nodes: int
    rounds: int
    fragments: int
    counting: bool = False
    standing: bool = False


def allowed(calm: Stretch) -> Traffic:
    """What all nodes together may ask in a stretch of calm.

    A node asks at gaps that grow, to a second or a quarter of a cycle: a round costs it questions as the logarithm of
    its wait, and a long wait one or two a second. One that stands still meanwhile asks more closely, and a closer that
    stands asks for every snapshot.
    """
    beats = calm.nodes * (calm.seconds / calm.period + 2)
    rounds = calm.rounds + calm.fragments
    per_round = QUESTIONS_PER_ROUND + QUESTIONS_PER_ROUND_STANDING * calm.standing
    asking = QUESTIONS_AT_ONCE + per_round * rounds + QUESTIONS_PER_SECOND * calm.fragments * calm.seconds
    return Traffic(
        gets=int(calm.nodes * asking),
        puts=int(beats + rounds * (calm.nodes + SECTIONS_MOST + 2)),
        lists=int(2 * beats + calm.nodes * asking * calm.counting),
    )


def overspent(asked: Traffic, may: Traffic) -> Iterator[str]:
    """Requests by kind that went over what was allowed."""
    for kind in ("gets", "puts", "lists"):
        if getattr(asked, kind) > getattr(may, kind):
            yield f"{getattr(asked, kind)} {kind} in the calm, the budget is {getattr(may, kind)}"
