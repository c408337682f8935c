"""What sinks share: one that cannot write says so once and harms neither the training nor the other callbacks."""

import logging
from abc import ABC, abstractmethod

from gradientmail_core.events import Event

logger = logging.getLogger("gradientmail")


class Sink(ABC):
    """A callback for ``Session(callbacks=[...])``. Its first failure is logged; it tries again with each event."""

    def __init__(self) -> None:
        self._failed = False

    def __call__(self, event: Event) -> None:
        """Write an event; never raises."""
        try:
            self.write(event)
        except Exception as failure:
            if not self._failed:
                self._failed = True
                logger.warning("%s cannot write: %s", type(self).__name__, failure)

    @abstractmethod
    def write(self, event: Event) -> None:
        """Write an event; may raise."""
