"""Whether a node's own ledger agrees with the tape: no token counted twice, none lost without an entry."""

from collections import Counter
from collections.abc import Iterator, Sequence

from gradientmail_core.engine.learner import books
from gradientmail_core.protocol.records import RoundRecord
from gradientmail_core.sim.world import SimulatedNode


def imbalances(node: SimulatedNode, records: Sequence[RoundRecord], fragments: int) -> Iterator[str]:
    """What is wrong with a life's ledger, given every record of the run.

    Processed tokens are merged, in flight, carried or dropped, at any moment of any life. A life knows of no merged
    token that is in no record under its own name and incarnation; and one that ended as it should knows of all.
    """
    if node.learner is None:
        return
    mine, whole = (node.name, node.incarnation), _left(node)
    merged = Counter[int]()
    for record in records:
        for who in record.participants:
            if (who.node, who.incarnation) == mine:
                merged[record.round % fragments] += who.tokens
    for fragment, book in enumerate(books(node.learner.state)):
        if not book.balanced:
            yield f"{node.name} lost tokens of fragment {fragment} without an entry: {book}"
        if book.merged > merged[fragment] or (whole and not book.in_flight and book.merged != merged[fragment]):
            yield f"{node.name} counts {book.merged} merged tokens of fragment {fragment}, the tape {merged[fragment]}"


def _left(node: SimulatedNode) -> bool:
    task = node.task
    return task is not None and task.done() and not task.cancelled() and task.exception() is None
