"""Runs for commands to look at: real sessions with a model of a few numbers."""

from gradientmail_core import DiLoCo, FactoredGossip, Session
from gradientmail_core.sim.world import ToyModel

DILOCO = DiLoCo(sync_every=5, fragments=2, overlap_steps=0, delta_codec="F32")
GOSSIP = FactoredGossip.global_m1(sync_every=5, fragments=2)


def train(url: str, steps: int = 15, node: str = "a", algorithm: DiLoCo | FactoredGossip = DILOCO) -> None:
    """One node's whole life."""
    model = ToyModel()
    with Session(model, mailbox=url, algorithm=algorithm, node=node) as session:
        for _ in range(steps):
            model._flat -= 1e-3
            session.step(8)
