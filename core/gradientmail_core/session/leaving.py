"""Leaving a run within bounds, also where the store does not answer or is full.

A mailbox repeats a request for as long as a node trains: an outage costs time. Who leaves has nothing left to wait for.
Whatever it could not write runs out by itself, as after a crash, and what it trained beyond the newest commit it could
read was not committed.
"""

from gradientmail_core.clock import TimeOver
from gradientmail_core.engine.gossip import GossipNode
from gradientmail_core.engine.node import Node
from gradientmail_core.engine.run import Host

RELEASE_SECONDS = 10.0


async def left(host: Host, engine: Node | GossipNode, patience: float) -> None:
    """Let ``engine`` leave; cut it short once both of its waits of ``patience`` seconds and its release are overdue."""
    try:
        await host.clock.within(2 * patience + RELEASE_SECONDS, engine.leave(patience))
    except TimeOver:
        await engine.abort("the mailbox did not answer while leaving; the lease runs out by itself")
