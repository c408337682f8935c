"""Where nodes meet: mailboxes, their wrappers, and opening one by its URL."""

from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry, Mailbox, StoreClass
from gradientmail_core.mailbox.careful import ListedMailbox, OneWriterMailbox, ReadBackMailbox
from gradientmail_core.mailbox.directory import DirectoryMailbox
from gradientmail_core.mailbox.faulty import Faults, FaultyMailbox
from gradientmail_core.mailbox.memory import MemoryMailbox
from gradientmail_core.mailbox.metered import MeteredMailbox, Usage
from gradientmail_core.mailbox.opening import open_mailbox
from gradientmail_core.mailbox.probe import Probe, probe_store
from gradientmail_core.mailbox.retrying import RetryingMailbox, RetryPolicy
from gradientmail_core.mailbox.throttled import ThrottledMailbox

__all__ = [
    "Body",
    "CreateOutcome",
    "DirectoryMailbox",
    "Entry",
    "Faults",
    "FaultyMailbox",
    "ListedMailbox",
    "Mailbox",
    "MemoryMailbox",
    "MeteredMailbox",
    "OneWriterMailbox",
    "Probe",
    "ReadBackMailbox",
    "RetryPolicy",
    "RetryingMailbox",
    "StoreClass",
    "ThrottledMailbox",
    "Usage",
    "open_mailbox",
    "probe_store",
]
