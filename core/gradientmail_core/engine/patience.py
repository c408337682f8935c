"""How often, and how long, an object that must be there is looked for before it is taken for lost.

Time alone does not tell: a process that stood still, or whose one question took longer than the lease time-out, has
looked but once, perhaps before somebody wrote the object again, and a store may not find an object for once. So what
counts is a look that began after the time-out and found nothing either, after so many others.
"""

from dataclasses import dataclass, replace

from gradientmail_core.engine.run import Host

MISSES_LEAST = 5


@dataclass(frozen=True, slots=True)
class Patience:
    """Looks in vain so far, in a row; ``until`` and ``began``, when the last of them began, are on the node's clock."""

    until: float
    misses: int = 0
    began: float = float("-inf")

    @classmethod
    def starting(cls, host: Host) -> "Patience":
        """Patience for the lease time-out from now."""
        return cls(host.clock.now() + host.timeouts.lease)

    def missed(self, began: float) -> "Patience":
        """After one more look in vain, which began then."""
        return replace(self, misses=self.misses + 1, began=began)

    @property
    def is_over(self) -> bool:
        """Whether the object is lost."""
        return self.began >= self.until and self.misses >= MISSES_LEAST
