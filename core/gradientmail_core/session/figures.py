"""A session in numbers, by name, for a progress bar or a logger."""

from gradientmail_core.events import FragmentAligned
from gradientmail_core.mailbox.metered import Usage


def figures(
    *,
    usage: Usage,
    live: int,
    rounds: int,
    tokens: int,
    step: int,
    stalled: float,
    merged: int,
    aligned: FragmentAligned | None,
) -> dict[str, float]:
    """What :meth:`Session.metrics` gives; ``aligned`` is the newest commit that was written into the model."""
    numbers = {
        "round": float(rounds),
        "live_nodes": float(live),
        "merged_tokens": float(tokens),
        "merged_rounds": float(merged),
        "bytes_up": float(usage.bytes_up),
        "bytes_down": float(usage.bytes_down),
        "requests": float(usage.requests),
        "stall_seconds": stalled,
        "global_step": float(step),
    }
    if aligned is not None:
        numbers["participants"] = float(aligned.participants)
        if aligned.cosine is not None:
            numbers["cosine"] = aligned.cosine
    return numbers
