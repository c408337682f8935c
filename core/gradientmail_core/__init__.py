"""Low-communication training over a mailbox, for any framework (``import gradientmail_core as gm``)."""

from typing import TYPE_CHECKING

from gradientmail_core.algorithms.alignment import Adaptive, Blend, Carry, Eager, Overwrite
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.gossip import FactoredGossip, Strengthen
from gradientmail_core.algorithms.merge import Median, Rda, TrimmedMean, WeightedMean
from gradientmail_core.algorithms.mixing import All, Nothing, Pair, Peers
from gradientmail_core.algorithms.outer import SGD, Adam, HeavyBall, Nesterov
from gradientmail_core.algorithms.partition import ByBytes, Strided
from gradientmail_core.engine.ledger import Ledger
from gradientmail_core.errors import (
    ConfigurationError,
    GradientMailError,
    MailboxDenied,
    MailboxError,
    MailboxUnavailable,
    RankLost,
    RunMismatch,
    SchemaMismatch,
    SessionClosed,
    SessionFailed,
    WaitTimeout,
)
from gradientmail_core.events import Event, log_event
from gradientmail_core.mailbox import DirectoryMailbox, Mailbox, MemoryMailbox, MeteredMailbox, open_mailbox
from gradientmail_core.patterns.shared_queue import SharedQueue
from gradientmail_core.session import Session, align

if TYPE_CHECKING:
    from gradientmail_core.mailbox.objectstore import Credentials, S3Mailbox

__all__ = [
    "SGD",
    "Adam",
    "Adaptive",
    "All",
    "Blend",
    "ByBytes",
    "Carry",
    "ConfigurationError",
    "Credentials",
    "DiLoCo",
    "DirectoryMailbox",
    "Eager",
    "Event",
    "FactoredGossip",
    "GradientMailError",
    "HeavyBall",
    "Ledger",
    "Mailbox",
    "MailboxDenied",
    "MailboxError",
    "MailboxUnavailable",
    "Median",
    "MemoryMailbox",
    "MeteredMailbox",
    "Nesterov",
    "Nothing",
    "Overwrite",
    "Pair",
    "Peers",
    "RankLost",
    "Rda",
    "RunMismatch",
    "S3Mailbox",
    "SchemaMismatch",
    "Session",
    "SessionClosed",
    "SessionFailed",
    "SharedQueue",
    "Strengthen",
    "Strided",
    "TrimmedMean",
    "WaitTimeout",
    "WeightedMean",
    "align",
    "log_event",
    "open_mailbox",
]

_OBJECT_STORES = frozenset({"Credentials", "S3Mailbox"})


def __getattr__(name: str) -> object:
    """What object stores need is loaded when it is first asked for."""
    if name not in _OBJECT_STORES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gradientmail_core.mailbox import objectstore

    return getattr(objectstore, name)
