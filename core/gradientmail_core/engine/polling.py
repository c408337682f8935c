"""When to ask the store for what: the run's own timings say when something is due.

A commit is expected one smoothed interval after the last; asked for then, and again after growing gaps of
at most a quarter of the cycle. Before any interval is known, once a second from this node's own snapshot
on. While nothing is due, nothing is asked: the regular listing of ``live/`` brings the rest.
"""

from gradientmail_core.engine.chain import Head

FIRST_GAP = 0.25
LEAST_GAP = 0.02
UNKNOWN_GAP = 1.0
SNAPSHOTS_EXPECTED = 0.7
OVERDUE_LEAST = 5.0


def gap(attempts: int, interval: float | None) -> float:
    """Seconds to the next question after ``attempts`` without an answer."""
    if interval is None:
        return UNKNOWN_GAP
    return max(min(FIRST_GAP * 2 ** min(attempts, 20), interval / 4), LEAST_GAP)


def commit_expected_at(head: Head, published_at: float | None, period: float) -> float:
    """When to ask first for the commit after ``head``."""
    if head.interval is not None:
        return head.seen + head.interval
    return (published_at if published_at is not None else head.seen) + min(UNKNOWN_GAP, period)


def snapshots_expected_at(head: Head, published_at: float | None, listed: bool, period: float) -> float:
    """When a closer asks first for the snapshots of the round after ``head``."""
    if listed:
        return head.seen
    expected = head.seen + (period if head.interval is None else SNAPSHOTS_EXPECTED * head.interval)
    return expected if published_at is None else min(expected, published_at)


def overdue_after(head: Head, lease_seconds: float) -> float:
    """Seconds from a known quorum of snapshots to the moment a round counts as overdue."""
    estimates = head.estimates
    if estimates.sync <= 0:
        return lease_seconds
    return max(3 * (estimates.quorum + estimates.grace + estimates.sync), OVERDUE_LEAST)
