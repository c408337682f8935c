"""Is this store fit for a run? Every property a run leans on, tried on the store itself, with what was seen.

A check uses a prefix of its own that no run uses, and leaves nothing behind. One that cannot end says so: a
store that is silent is as unfit as one that refuses. Values here; the checks are in
:mod:`gradientmail_core.mailbox.checks`.
"""

import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, Protocol, TypeAlias, assert_never

from gradientmail_core.clock import Clock, TimeOver
from gradientmail_core.errors import MailboxError
from gradientmail_core.events import StoreStalled
from gradientmail_core.mailbox.base import Mailbox, StoreClass
from gradientmail_core.mailbox.retrying import RetryingMailbox, RetryPolicy
from gradientmail_core.mailbox.surroundings import Described

Grade: TypeAlias = Literal["good", "caution", "bad", "unknown"]
Verdict: TypeAlias = Literal["fit", "limited", "unfit"]

CHECK_SECONDS = 120.0
CLEANING_SECONDS = 60.0
DOCTOR = "doctor/"
_PATIENCE = RetryPolicy(report_after=0.0)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw, and what to do about it. ``figures`` are in the units their names end with."""

    check: str
    grade: Grade
    observation: str
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    store: StoreClass | None = None


@dataclass(frozen=True, slots=True)
class Examination:
    """Every finding about the store at ``url``."""

    url: str
    findings: tuple[Finding, ...]

    @property
    def store(self) -> StoreClass | None:
        """What its ``create`` is worth, if that was found out."""
        return next((finding.store for finding in self.findings if finding.store is not None), None)

    @property
    def verdict(self) -> Verdict:
        """``limited``: usable only by a run that closes in one place, or with one named syncer."""
        if any(finding.grade == "bad" for finding in self.findings):
            return "unfit"
        return "fit" if self.store == "atomic" else "limited"

    def as_json(self) -> dict[str, object]:
        """Everything, of plain types."""
        return {"url": self.url, "verdict": self.verdict, "store": self.store, "findings": self._plain_findings()}

    def _plain_findings(self) -> list[dict[str, object]]:
        return [asdict(finding) for finding in self.findings]


@dataclass(frozen=True, slots=True)
class Patient:
    """The store under examination: handles with connections of their own, a prefix, and what was asked for.

    ``size`` is that of a large body in bytes, ``races`` how often create-once is raced; ``tell`` hears of progress.
    """

    handles: tuple[Mailbox, ...]
    described: Described | None
    prefix: str
    clock: Clock
    size: int
    races: int
    tell: Callable[[str], None]


class Check(Protocol):
    """One examination; ``essential`` ones end the whole when they find the store bad."""

    @property
    def name(self) -> str:
        """What is checked, in a word or two."""
        ...

    @property
    def essential(self) -> bool:
        """Whether nothing further can be learned from a store that fails here."""
        ...

    def __call__(self, patient: Patient) -> Awaitable[Finding]:
        """Examine and judge."""
        ...


async def examined(
    handles: Sequence[Mailbox],
    clock: Clock,
    checks: Sequence[Check],
    *,
    size: int,
    races: int,
    tell: Callable[[str], None] = lambda text: None,
    done: Callable[[Finding], None] = lambda finding: None,
) -> Examination:
    """Run ``checks`` in order on the store that all ``handles`` lead to, and remove what they left.

    ``done`` hears each finding as it is made. Bounded in time; raises nothing that the store can cause.
    """
    prefix = f"{DOCTOR}{secrets.token_hex(8)}"
    described = handles[0] if isinstance(handles[0], Described) else None
    patient = Patient(tuple(handles), described, prefix, clock, size, races, tell)
    findings: list[Finding] = []
    try:
        for check in checks:
            tell(check.name)
            findings.append(await _bounded(check, patient))
            done(findings[-1])
            if check.essential and findings[-1].grade == "bad":
                break
    finally:
        tell("cleaning up")
        left = await _cleaned(patient)
    if left is not None:
        findings.append(left)
        done(left)
    return Examination(handles[0].url, tuple(findings))


def _steady(handle: Mailbox, clock: Clock, hear: Callable[[StoreStalled], None]) -> Mailbox:
    """``handle``, with passing faults waited out and told."""
    return RetryingMailbox(handle, clock, random.Random(), hear, _PATIENCE)


async def _bounded(check: Check, patient: Patient) -> Finding:
    """The check's finding, or that it could not be made."""
    stalls: list[StoreStalled] = []
    steady = tuple(_steady(handle, patient.clock, stalls.append) for handle in patient.handles)
    try:
        return await patient.clock.within(CHECK_SECONDS, check(replace(patient, handles=steady)))
    except TimeOver:
        cause = f" Its last fault: {stalls[-1].cause}" if stalls else ""
        return Finding(
            check.name, "bad", f"No end within {CHECK_SECONDS:.0f} s.{cause}", "Check endpoint, network and load."
        )
    except MailboxError as error:
        return Finding(check.name, "bad", error.cause, error.remedy)


async def _cleaned(patient: Patient) -> Finding | None:
    """Remove everything below the prefix; a finding if that could not be done."""
    handle = _steady(patient.handles[0], patient.clock, lambda event: None)

    async def clean() -> None:
        for key in [entry.key async for entry in handle.list(f"{patient.prefix}/")]:
            await handle.delete(key)

    try:
        await patient.clock.within(CLEANING_SECONDS, clean())
        return None
    except (MailboxError, TimeOver):
        observation = f"Objects may be left below {patient.prefix}/."
        return Finding(
            "cleaning up", "caution", observation, "Delete them; a run under the same prefix passes them over."
        )


def advice(examination: Examination) -> str:
    """What the verdict means for a run, in a sentence or two."""
    match examination.verdict:
        case "fit":
            return "Any run works here."
        case "limited":
            return {
                "racy": "Two creates of one key can both succeed: a run closes all its rounds on one node here, and "
                "another takes over only once that node's lease has run out.",
                "none": "Nothing stops a create from overwriting: a run works here only with one named syncer.",
            }.get(examination.store or "", "What create-once is worth here was not found out.")
        case "unfit":
            return "A run would fail or lose work here."
        case verdict:
            assert_never(verdict)
