"""When to ask the store for what: the run's own timings say when something is due.

A commit is expected one interval after the last; asked for then, and again after growing gaps of at most a
quarter of the cycle, the first a sixteenth. Where the prediction is too short, gaps go on growing with the time
that the commit is late, and a late commit costs questions as the logarithm of that time. A node that has published
asks a beat period later at the latest, for a prediction made of one long outage is too long. Before any interval is
known, at growing gaps of at most a second from this node's own snapshot on. While nothing is due, nothing is asked:
the regular listing of ``live/`` brings the rest.
"""

from gradientmail_core.engine.chain import Head

FIRST_GAP = 0.25
PRECISION = 1 / 16
LEAST_GAP = 0.02
BARRIER_GROWTH = 0.5
UNKNOWN_GAP = 1.0
UNKNOWN_FIRST_GAP = 0.1
LAG_SHRINKS = 0.9
LAG_SMOOTHING = 0.5
OVERDUE_LEAST = 5.0
OWN_UPLOAD_CLOSINGS = 1.5
OWN_UPLOAD_LEAST = 2.0


def commit_gap(attempts: int, interval: float | None, late: float = 0.0) -> float:
    """Seconds to the next question for a commit after ``attempts`` without an answer, ``late`` seconds after its time.

    At most a quarter of the cycle, or of ``late`` if that is longer.
    """
    if interval is None:
        return unknown_gap(attempts)
    first = min(FIRST_GAP, interval * PRECISION)
    return max(min(first * 2.0 ** min(attempts, 20), max(interval, late) / 4), LEAST_GAP)


def unknown_gap(attempts: int) -> float:
    """Seconds to the next question in a chain's first round, when nothing is known of its pace."""
    return min(UNKNOWN_FIRST_GAP * 2.0 ** min(attempts, 20), UNKNOWN_GAP)


def barrier_gap(waited: float) -> float:
    """Seconds to the next question of a node that has stood still for ``waited`` seconds: half as long again.

    So what it waits for is found at most half as late as it came, for a number of questions that grows with the
    logarithm of the wait.
    """
    return max(waited * BARRIER_GROWTH, LEAST_GAP)


def snapshot_gap(attempts: int, interval: float | None, grace: float | None) -> float:
    """Seconds to the next question for snapshots; a quarter of the grace while one runs."""
    usual = commit_gap(attempts, interval)
    return usual if grace is None else max(min(usual, grace / 4), LEAST_GAP)


def probable_commit(now: float, asked_at: float, interval: float | None) -> float:
    """When a commit found now was probably made.

    Between the last question and now; if it was there at the first question, a little before, so that the next
    one is asked earlier and a follower never drifts behind its closer.
    """
    earliest = asked_at if asked_at > float("-inf") else now - max((interval or 0.0) * PRECISION, LEAST_GAP) * 2
    return max((now + earliest) / 2, now - UNKNOWN_GAP)


def commit_expected_at(head: Head, published_at: float | None, period: float) -> float:
    """When to ask first for the commit after ``head``.

    At most a beat period after this node's own snapshot, whatever is predicted: after an outage it would be as long
    again, although the round may close as soon as everybody has published.
    """
    if head.asked_after is not None:
        expected_at = head.seen + head.asked_after
        return expected_at if published_at is None else min(expected_at, max(published_at, head.seen) + period)
    return published_at + UNKNOWN_FIRST_GAP if published_at is not None else head.seen + period


def snapshots_expected_at(head: Head, published_at: float | None, listed: bool, period: float, lag: float) -> float:
    """When a closer asks first for the snapshots of the round after ``head``.

    ``lag`` seconds, which the others usually take longer, after its own; or, if it is slow itself, when the round's
    median learner should have published.
    """
    if listed:
        return head.seen
    if head.interval is None:
        return head.seen + period if published_at is None else min(head.seen + period, published_at)
    return snapshots_due_at(head, published_at) + lag


def snapshots_due_at(head: Head, published_at: float | None) -> float:
    """When this node published, or when the round's median learner should have, whichever comes first."""
    due_at = head.seen + max((head.interval or 0.0) - head.estimates.quorum - head.estimates.sync, 0.0)
    return due_at if published_at is None else min(due_at, published_at)


def usual_lag(lag: float, asked: int, found_after: float, asked_after: float) -> float:
    """The lag after a round whose last snapshot was found ``found_after`` seconds after it was due.

    Between that question and the one before (``asked_after``) if there were several; a little less if the first one
    found everything.
    """
    if asked <= 1:
        return lag * LAG_SHRINKS
    return lag + LAG_SMOOTHING * ((found_after + max(asked_after, 0.0)) / 2 - lag)


def overdue_after(head: Head, lease_seconds: float) -> float:
    """Seconds from a known quorum of snapshots to the moment a round counts as overdue.

    Three times the usual closing and at least 5 s, but never over half the lease time-out: who sets a short one
    wants a dead closer replaced sooner. Until a closing was timed, the whole lease time-out.
    """
    estimates = head.estimates
    if estimates.sync <= 0:
        return lease_seconds
    usual = 3 * (estimates.quorum + estimates.grace + estimates.sync)
    return min(max(usual, OVERDUE_LEAST), lease_seconds / 2)


def own_upload_after(head: Head) -> float | None:
    """Seconds a closer keeps its own snapshot back in the hope that its round closes; None if nothing was timed yet."""
    estimates = head.estimates
    if estimates.sync <= 0:
        return None
    return max(OWN_UPLOAD_CLOSINGS * (estimates.quorum + estimates.grace + estimates.sync), OWN_UPLOAD_LEAST)
