"""One node's part in a run, for a training loop."""

from gradientmail_core.session.aligning import align
from gradientmail_core.session.arguments import default_node
from gradientmail_core.session.readings import Algorithm
from gradientmail_core.session.session import Session

__all__ = ["Algorithm", "Session", "align", "default_node"]
