"""After faults stop all nodes agree: with the tape, with each other, and with what the store gives back.

A node agrees if its fragments' heads are records of the tape, if they move with it, and if parameters, outer state
and unstored remainder rebuilt from the store are the very bytes that it goes on from. A closer that merges from other
bytes than a successor would read forks the run as soon as it dies; nobody notices before.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from gradientmail_core.engine.chain import Head
from gradientmail_core.engine.closing import OuterState, outer_layout
from gradientmail_core.engine.fragment import Fragment
from gradientmail_core.engine.loading import Source, parameters
from gradientmail_core.protocol.exchange import get_section
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.records import RoundRecord, Section, digest
from gradientmail_core.sim.world import SimulatedNode
from gradientmail_core.tensors.schema import FragmentLayout


def behind(nodes: Sequence[SimulatedNode], versions: Mapping[int, int]) -> Iterator[tuple[str, int]]:
    """Nodes, by name, and fragments whose head is older than ``versions``; all fragments of a node not yet begun."""
    for node in nodes:
        heads = {fragment.head.fragment: fragment.head.version for fragment in fragments_of(node)}
        yield from ((node.name, number) for number, version in versions.items() if heads.get(number, -1) < version)


def strangers(nodes: Sequence[SimulatedNode], tape: Sequence[RoundRecord]) -> Iterator[str]:
    """Nodes whose head is no record of the tape."""
    digests = {record.round: digest(record.encoded()) for record in tape}
    for node in nodes:
        for fragment in fragments_of(node):
            head = fragment.head
            if head.record is not None and digests.get(head.record.round) != head.digest:
                yield f"{node.name} stands on another record of round {head.record.round} than the tape's"


def fragments_of(node: SimulatedNode) -> Sequence[Fragment]:
    """The chains of a node as it sees them; none before it began."""
    return node.engine.fragments if node.engine is not None else ()


async def differing(node: SimulatedNode, source: Source) -> AsyncIterator[str]:
    """What of a node's state at the head of one fragment is not what the store gives back at that head.

    A payload that is not there (any more) is no difference: completeness is another rule.
    """
    fragment = fragments_of(node)[source.layout.fragment]
    head, theta, outer = fragment.head, fragment.theta, fragment.outer
    committed = await parameters(source, head.version, head.sections)
    if not isinstance(committed, Rejected) and committed.tobytes() != theta.tobytes():
        yield f"{node.name} goes on from other parameters than a node that reads version {head.version}"
    if outer is not None:
        stored = await _outer(source, head, node.settings.outer.state_names())
        if stored is not None and stored != _bytes(outer):
            yield f"{node.name} goes on from another outer state than a node that reads version {head.version}"


async def _outer(source: Source, head: Head, names: Sequence[str]) -> tuple[bytes, bytes] | None:
    """The outer state and the remainder that the head's record names, zeros where it names none; None if missing."""
    state = await _section(source, head.section("outer"), outer_layout(source.layout, names))
    residual = await _section(source, head.section("residual"), source.layout)
    if state is None or residual is None:
        return None
    return state, residual if head.section("residual") is not None else b""


async def _section(source: Source, section: Section | None, layout: FragmentLayout) -> bytes | None:
    if section is None:
        return bytes(4 * layout.size)
    values = await get_section(source.mailbox, source.clock, section, layout)
    if isinstance(values, Rejected):
        assert values.reason == "missing", f"{section.key} is there and {values.reason}"
        return None
    return values.tobytes()


def _bytes(state: OuterState) -> tuple[bytes, bytes]:
    arrays = b"".join(part.tobytes() for part in state.arrays)
    return arrays, b"" if state.residual is None else state.residual.tobytes()
