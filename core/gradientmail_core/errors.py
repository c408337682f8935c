"""Every error a user can meet: each names its cause and its remedy.

Errors that content read from a store can cause do not exist here. What a store holds is parsed to a
value or to a :class:`gradientmail_core.protocol.records.Rejected`, because nothing a stranger writes
may stop a run. Credentials never appear in a message: raise with the key or the redacted URL only.
"""


class GradientMailError(Exception):
    """Base of all errors of this library; ``remedy`` says what the user can do."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause} {remedy}".strip())
        self.cause = cause
        self.remedy = remedy


class ConfigurationError(GradientMailError, ValueError):
    """A setting that cannot work, found before anything was written."""


class SchemaMismatch(GradientMailError):
    """This node's model has other trainable tensors than the run's; the cause lists the differences."""


class RunMismatch(GradientMailError):
    """The prefix holds a run with other settings, another format, or something that is no run."""


class MailboxError(GradientMailError):
    """The store refused, or could not be reached."""


class MailboxUnavailable(MailboxError):
    """A passing fault (time-out, reset, throttle, 5xx): the same request may succeed later."""


class MailboxDenied(MailboxError):
    """A lasting refusal (missing bucket, no permission, read-only directory): retrying cannot help."""


class MailboxUnsupported(MailboxError):
    """The store lacks an operation the protocol needs, such as an atomic create."""


class PayloadTooLarge(MailboxError):
    """A body exceeds what the caller said it may read."""


class WaitTimeout(GradientMailError, TimeoutError):
    """What was waited for did not happen in the time that the caller allowed."""


class RankLost(GradientMailError):
    """A rank this node had taken over went back to its former holder, which was only slow."""


class SessionClosed(GradientMailError):
    """The session ended (closed, aborted or failed) before this call."""


class SessionFailed(GradientMailError):
    """The session's background work hit a lasting fault; the cause carries it."""
