"""What a session does otherwise in a gossip run: how it joins, what it waits for, what a checkpoint means.

A node's momentum and its start of the round are not in a checkpoint, and the run has moved on when it is loaded. So a
node that is restored joins like a new one, from the newest mean over all nodes with zero momentum; its inner
optimizer and its data position are the trainer's and stay as restored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradientmail_core.algorithms.gossip import NAME
from gradientmail_core.engine.gossip import GossipNode, newest_means
from gradientmail_core.engine.gossip_gathering import Surroundings
from gradientmail_core.engine.gossip_learner import Begun, Ended, GossipLearner, Moved, Rejoin
from gradientmail_core.engine.gossip_roster import listed_gossip, newest_roster
from gradientmail_core.engine.gossip_shares import GossipRun, Means
from gradientmail_core.engine.joining import Found
from gradientmail_core.engine.run import Board, Host
from gradientmail_core.session.background import Loop
from gradientmail_core.tensors.model import Flat, Model


@dataclass(frozen=True, slots=True)
class Bridge:
    """Leads from the training thread to the engine's: rounds, gradients, and outer steps to the engine's loop."""

    loop: Loop
    engine: GossipNode

    def begin(self, begun: Begun) -> None:
        """A round begins."""
        self.loop.call(lambda: self.engine.begin(begun))

    def exchange(self, ended: Ended) -> None:
        """A round's gradients wait for Mix2."""
        self.loop.call(lambda: self.engine.exchange(ended))

    def learner(self, model: Model, joined: Rejoin, delivered: Callable[[], None]) -> GossipLearner:
        """The learner of a node that has joined; ``delivered`` is called when there is news for it."""
        return GossipLearner(
            model,
            self.engine.layouts,
            self.engine.settings,
            joined,
            begin=self.begin,
            exchange=self.exchange,
            applied=self.applied,
            delivered=delivered,
        )

    def applied(self, moved: Moved) -> None:
        """The learner took an outer step, or went on elsewhere."""
        self.engine.moved(moved)

    async def started(self, learner: GossipLearner, failed: Callable[[BaseException], None]) -> None:
        """Let the engine work for the learner."""
        self.engine.start(learner, failed)


def gossip_state(engine: GossipNode, learner: GossipLearner) -> dict[str, object]:
    """What a checkpoint holds of a gossip node: nothing that a join would not give anew."""
    return {"version": 1, "algorithm": NAME, "run": engine.run_id, "round": learner.state.round}


def is_gossip_state(state: Mapping[str, object]) -> bool:
    """True for what :func:`gossip_state` made."""
    return state.get("algorithm") == NAME


async def newest_model(host: Host, found: Found, settings: GossipRun) -> tuple[list[Flat], int]:
    """The newest mean over all nodes of every fragment, and the run's step; nothing is written."""
    board = Board(host)
    listed = await listed_gossip(host, board)
    vectors = await newest_means(Surroundings(host, settings, board, Means()), listed)
    newest = await newest_roster(host, settings, listed.rosters)
    step = 0 if newest is None else newest * settings.settings.sync_every
    return [vector[: layout.size] for vector, layout in zip(vectors, found.layouts, strict=True)], step
