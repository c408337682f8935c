"""What a pattern knows of the node that uses it: its name, its mailbox and clock, and who else lives."""

from collections.abc import Callable
from dataclasses import dataclass

from gradientmail_core.clock import Clock
from gradientmail_core.errors import MailboxUnsupported
from gradientmail_core.events import Callback
from gradientmail_core.mailbox.base import Mailbox, StoreClass
from gradientmail_core.protocol.records import Claim


@dataclass(frozen=True, slots=True)
class Party:
    """A node in a run, as patterns see it.

    ``store`` is what a create there is worth, and ``mailbox`` already takes the precautions for it.
    ``alive(node, since)`` says whether a node may still be there; one that was never seen counts as silent from
    ``since`` (seconds of ``clock``). ``period`` is the time between two looks, ``nonce`` draws fresh hex.
    """

    run: str
    node: str
    incarnation: str
    mailbox: Mailbox
    clock: Clock
    period: float
    nonce: Callable[[], str]
    alive: Callable[[str, float], bool]
    emit: Callback
    store: StoreClass = "atomic"

    def check_claims(self, what: str) -> None:
        """Raise :class:`MailboxUnsupported` where two nodes could both have claimed the same thing."""
        if self.store == "none":
            raise MailboxUnsupported(
                f"{what} must be claimed, and {self.mailbox.url} keeps no two nodes from claiming the same.",
                "Give each node a fixed slice of the data, by a number from your launcher; or use a store that honours "
                "If-None-Match (gradientmail doctor URL tells).",
            )

    def claim(self) -> Claim:
        """A claim in this node's name, fresh with each call."""
        return Claim(self.run, self.node, self.incarnation, self.nonce())

    def is_older_self(self, holder: Claim) -> bool:
        """True for a claim of an earlier process of this node."""
        return holder.node == self.node and holder.incarnation != self.incarnation
