"""Which parameters an evaluation sees: this node's own, or the ones that were committed.

Between two merges every node has drifted its own way, and its loss says as much about its drift as about the
run. With the committed parameters all nodes would report the same loss on the same data, and the one that counts.
Buffers, such as a BatchNorm's statistics, are this node's own in both cases.

Either way the node says that it evaluates, so that no round waits for it meanwhile.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox import Mailbox
from gradientmail_core.session import Session, align
from gradientmail_core.tensors.model import KeepingModel, set_aside

CHOICES = ("local", "global")


def checked_choice(evaluate: str) -> str:
    """``evaluate``; :class:`ConfigurationError` if it is none of :data:`CHOICES`."""
    if evaluate not in CHOICES:
        raise ConfigurationError(f"evaluate={evaluate!r}.", f"Use one of {', '.join(map(repr, CHOICES))}.")
    return evaluate


def evaluation(session: Session, evaluate: str) -> AbstractContextManager[object]:
    """What holds while a node that is training evaluates."""
    return session.global_model() if evaluate == "global" else session.paused()


@contextmanager
def committed(model: KeepingModel, mailbox: str | Mailbox) -> Iterator[int]:
    """Within this, ``model`` holds the newest parameters of the run in ``mailbox``, without a part in it; its step.

    Raises what :func:`gradientmail_core.session.align` raises.
    """
    write_back = set_aside(model, ())
    try:
        yield align(model, mailbox=mailbox)
    finally:
        write_back()
