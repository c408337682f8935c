"""The simulator's check of ledgers: silent on honest runs, and loud where an entry is missing or made up."""

import asyncio
from dataclasses import replace

import pytest

from gradientmail_core.algorithms.alignment import Alignment, Carry, Overwrite
from gradientmail_core.engine.learner import books
from gradientmail_core.engine.ledger import Account
from gradientmail_core.events import TokensBooked
from gradientmail_core.sim.accounts import imbalances
from gradientmail_core.sim.checks import tape
from gradientmail_core.sim.world import SimulatedNode
from tests.core.engine.parts import SETTINGS, Place, virtually


async def pair(place: Place, alignment: Alignment) -> list[SimulatedNode]:
    """Two nodes of different speed at the end of a run."""
    settings = replace(SETTINGS, alignment=alignment)
    nodes = [
        place.launch(name, settings=settings, steps=200, step_seconds=seconds, min_nodes=2)
        for name, seconds in (("a", 0.1), ("b", 0.17))
    ]
    await asyncio.gather(*(node.task for node in nodes if node.task is not None))
    return nodes


@pytest.mark.parametrize("alignment", [Overwrite(), Carry()])
def test_every_token_of_every_node_is_accounted_for(alignment: Alignment) -> None:
    async def main(place: Place) -> None:
        nodes = await pair(place, alignment)
        records = await tape(place.mailbox)
        for node in nodes:
            assert list(imbalances(node, records, 2)) == []
            assert node.learner is not None
            told = [event for name, event in place.log if name == node.name and isinstance(event, TokensBooked)]
            for fragment, book in enumerate(books(node.learner.state)):
                entries = [event for event in told if event.fragment == fragment]
                assert book.processed == 200 * 8 and book.merged > 800 and book.in_flight == book.carried == 0
                assert book.merged == sum(event.merged for event in entries), "every decision was told"
                lost = sum(tokens for event in entries for _, tokens in event.dropped)
                assert book.dropped_tokens == lost + book.dropped.get("left", 0)

    virtually(main)


def test_a_missing_entry_and_a_made_up_one_are_found() -> None:
    async def main(place: Place) -> None:
        node = (await pair(place, Overwrite()))[0]
        records = await tape(place.mailbox)
        assert node.learner is not None
        honest = node.learner.state
        node.learner.state = replace(
            honest, tracks=tuple(replace(track, tokens_then=track.tokens_then - 1) for track in honest.tracks)
        )
        assert any("without an entry" in wrong for wrong in imbalances(node, records, 2))
        first, *rest = honest.books
        node.learner.state = replace(honest, books=(Account(first.merged + 8, first.dropped), *rest))
        assert any("the tape" in wrong for wrong in imbalances(node, records, 2))

    virtually(main)
