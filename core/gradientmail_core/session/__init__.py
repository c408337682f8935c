"""One node's part in a run, for a training loop."""

from gradientmail_core.session.aligning import align
from gradientmail_core.session.session import Session, default_node

__all__ = ["Session", "align", "default_node"]
