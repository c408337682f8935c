"""One node's part in a run, for a training loop."""

from gradientmail_core.session.aligning import align
from gradientmail_core.session.session import Algorithm, Session, default_node

__all__ = ["Algorithm", "Session", "align", "default_node"]
