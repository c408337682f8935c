"""Low-communication training over a mailbox, for any framework (``import gradientmail_core as gm``)."""

from gradientmail_core.algorithms.alignment import Adaptive, Blend, Carry, Eager, Overwrite
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.gossip import FactoredGossip, Strengthen
from gradientmail_core.algorithms.merge import Median, Rda, TrimmedMean, WeightedMean
from gradientmail_core.algorithms.mixing import All, Nothing, Pair, Peers
from gradientmail_core.algorithms.outer import SGD, Adam, HeavyBall, Nesterov
from gradientmail_core.algorithms.partition import ByBytes, Strided
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

__all__ = [
    "SGD",
    "Adam",
    "Adaptive",
    "All",
    "Blend",
    "ByBytes",
    "Carry",
    "ConfigurationError",
    "DiLoCo",
    "DirectoryMailbox",
    "Eager",
    "Event",
    "FactoredGossip",
    "GradientMailError",
    "HeavyBall",
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
