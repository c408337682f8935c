"""One fragment's chain of commits, as a value: its head, and how a record moves it."""

from dataclasses import dataclass, replace

from gradientmail_core.algorithms.schedule import first_due_after
from gradientmail_core.protocol.exchange import Decided
from gradientmail_core.protocol.records import Estimates, Manifest, RoundRecord, Section

SMOOTHING = 0.3


@dataclass(frozen=True, slots=True)
class Head:
    """The newest commit of a fragment that this node knows.

    ``digest`` is that of its record (the manifest's for version 0), ``due`` the step of the fragment's next
    round, ``closer`` who closes that one. ``seen`` is when it was committed as far as this node can tell, and
    ``interval`` the time to the next commit as the record predicts it, both in seconds of this node's clock;
    ``measured`` is the smoothed time between the last commits.
    """

    fragment: int
    version: int
    digest: str
    step: int
    due: int
    closer: str
    sections: tuple[Section, ...]
    estimates: Estimates
    newest_step: int
    merged_tokens: int
    record: RoundRecord | None
    seen: float
    interval: float | None = None
    measured: float | None = None

    @property
    def asked_after(self) -> float | None:
        """Seconds after which a follower asks for the next commit: what is predicted, or less if it comes sooner.

        Where nodes differ in speed a prediction is too long, always by as much, and who trusts it falls behind.
        """
        known = [seconds for seconds in (self.interval, self.measured) if seconds is not None]
        return min(known, default=None)

    def section(self, name: str) -> Section | None:
        """The payload part called ``name``, if this version has one."""
        return next((section for section in self.sections if section.name == name), None)

    def next_round(self, fragments: int) -> int:
        """The round that is open for this fragment."""
        return (self.version + 1) * fragments + self.fragment


def genesis(manifest: Manifest, digest: str, fragment: int, sync_every: int, now: float) -> Head:
    """Version 0 of a fragment: the initial parameters the manifest names."""
    return Head(
        fragment=fragment,
        version=0,
        digest=digest,
        step=0,
        due=first_due_after(0, fragment, len(manifest.plan), sync_every),
        closer=manifest.closers[fragment],
        sections=(manifest.theta[fragment],),
        estimates=Estimates(),
        newest_step=0,
        merged_tokens=0,
        record=None,
        seen=now,
    )


def succeeded(head: Head, decided: Decided, fragments: int, now: float) -> Head:
    """The head after a newer commit of its fragment was read at ``now``."""
    record = decided.record
    version = record.round // fragments
    passed = (now - head.seen) / max(version - head.version, 1)
    smoothed = passed if head.measured is None else head.measured + SMOOTHING * (passed - head.measured)
    measured = smoothed if head.version > 0 or version == 1 else None
    return Head(
        fragment=head.fragment,
        version=version,
        digest=decided.digest,
        step=record.step,
        due=record.next_step,
        closer=record.closer,
        sections=record.sections,
        estimates=record.estimates,
        newest_step=record.newest_step,
        merged_tokens=record.merged_tokens,
        record=record,
        seen=now,
        interval=predicted_interval(record) or measured,
        measured=measured,
    )


def predicted_interval(record: RoundRecord) -> float | None:
    """Seconds from a commit to the next of its chain: the steps that remain to its due step, and the usual closing.

    None while nobody has timed a step. A measured interval alone would be slow to follow a run that speeds up, and a
    follower that asks too late slows the run down to what it expects.
    """
    estimates = record.estimates
    if estimates.step <= 0:
        return None
    return max(record.next_step - record.newest_step, 0) * estimates.step + estimates.quorum + estimates.sync


def first_seen(head: Head, now: float) -> Head:
    """The head of a joiner, whose intervals begin now."""
    return replace(head, seen=now, measured=None)
