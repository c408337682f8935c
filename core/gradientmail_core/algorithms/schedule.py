"""When each fragment is due: one grid of optimizer steps, the same on every node.

With a cycle of ``H`` steps and ``P`` fragments, fragment ``p`` is due at ``k*H + floor((p+1)*H/P)`` for
``k = 0, 1, 2, ...`` (Streaming DiLoCo, arXiv 2501.18512, section 2.2). Every fragment is due once a
cycle and the due steps of different fragments lie as evenly as whole steps allow, so the traffic is
flat. The grid is a pure function of its arguments: nodes agree on it without a message, and a missed
cycle is simply passed over.
"""

from gradientmail_core.errors import ConfigurationError


def offset_in_cycle(fragment: int, fragments: int, sync_every: int) -> int:
    """The fragment's due step in the first cycle, ``floor((p+1)*H/P)``: 0 to ``sync_every`` steps."""
    if not 0 <= fragment < fragments or sync_every < 1:
        raise ConfigurationError(
            f"No schedule for fragment {fragment} of {fragments} every {sync_every} steps.",
            "Use at least one fragment and sync_every of at least 1.",
        )
    return (fragment + 1) * sync_every // fragments


def first_due_after(step: int, fragment: int, fragments: int, sync_every: int) -> int:
    """The fragment's first grid step strictly greater than ``step`` (both in optimizer steps).

    Grid steps start at the first cycle: for any ``step`` before it, that is the first positive one the
    fragment has. Raises :class:`ConfigurationError` for a fragment out of range or an empty cycle.
    """
    offset = offset_in_cycle(fragment, fragments, sync_every)
    cycle = max(0, (step - offset) // sync_every + 1)
    return cycle * sync_every + offset


def is_due(step: int, fragment: int, fragments: int, sync_every: int) -> bool:
    """Whether ``step`` lies on the fragment's grid."""
    return first_due_after(step - 1, fragment, fragments, sync_every) == step
