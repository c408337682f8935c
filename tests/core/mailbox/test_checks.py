"""Each check on a store that breaks just its rule, and all of them on one that breaks none."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gradientmail_core.errors import MailboxDenied
from gradientmail_core.mailbox import Entry, MemoryMailbox
from gradientmail_core.mailbox.base import Body
from gradientmail_core.mailbox.checks import CHECKS
from gradientmail_core.mailbox.examination import Examination, examined
from gradientmail_core.mailbox.surroundings import Surroundings
from tests.core.mailbox.defective import Ignoring, Racing, Remembering
from tests.core.mailbox.virtual import run_virtually


class Unlisted(MemoryMailbox):
    """Lists nothing."""

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        for entry in list[Entry]():
            yield entry


class ReadOnly(MemoryMailbox):
    """Lets nobody write."""

    async def put(self, key: str, body: Body) -> None:
        raise MailboxDenied("PUT: refused (403 AccessDenied).", "Ask for permission.")


class Keeping(MemoryMailbox):
    """Deletes nothing."""

    async def delete(self, key: str) -> None:
        return


class Changing(MemoryMailbox):
    """Spoils large bodies."""

    async def put(self, key: str, body: Body) -> None:
        await super().put(key, bytes(body)[:-1] + b"?" if "/large/" in key else body)


class Saying(MemoryMailbox):
    """Tells something about itself."""

    def __init__(self, said: Surroundings) -> None:
        super().__init__()
        self.said = said

    async def surroundings(self) -> Surroundings:
        return self.said


def examination_of(mailbox: MemoryMailbox) -> Examination:
    async def work(clock: Any) -> Examination:
        return await examined([mailbox, mailbox], clock, CHECKS, size=1000, races=2)

    return run_virtually(work)


def test_a_sound_store_is_fit() -> None:
    examination = examination_of(MemoryMailbox())
    assert examination.verdict == "fit"
    assert [finding.check for finding in examination.findings] == [check.name for check in CHECKS]
    assert {finding.grade for finding in examination.findings} == {"good", "unknown"}


@pytest.mark.parametrize(
    ("mailbox", "check", "grade", "words"),
    [
        (ReadOnly(), "permissions", "bad", "May not write"),
        (Ignoring(), "create-once", "caution", "overwrote"),
        (Racing(), "create-once", "caution", "concurrent creates"),
        (Remembering(), "read-after-write", "caution", "absence was remembered"),
        (Unlisted(), "list-after-write", "bad", "not listed"),
        (Keeping(), "deletes", "caution", "still read"),
        (Changing(), "throughput", "bad", "changed"),
        (Saying(Surroundings(clock_offset=-3000.0)), "clock", "caution", "3000 s behind"),
        (Saying(Surroundings(clock_offset=2.0)), "clock", "good", "2 s ahead"),
        (Saying(Surroundings(expiring=("rule 'x' deletes objects after 7 days",))), "rules", "bad", "after 7 days"),
        (Saying(Surroundings(versioned=True, old_versions_expire=False)), "rules", "caution", "Versioning"),
        (Saying(Surroundings(versioned=True, old_versions_expire=True)), "rules", "good", ""),
        (Saying(Surroundings(versioned=False, locked=True)), "rules", "caution", "Object lock"),
        (Saying(Surroundings(expiring=(), uploads_expire=False)), "rules", "good", "No versioning"),
        (Saying(Surroundings()), "rules", "unknown", "does not tell"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MemoryMailbox) else None,
)
def test_what_is_broken_is_found(mailbox: MemoryMailbox, check: str, grade: str, words: str) -> None:
    (finding,) = (finding for finding in examination_of(mailbox).findings if finding.check == check)
    assert finding.grade == grade and words in finding.observation
    assert finding.remedy or grade in ("good", "unknown")


def test_classes_of_stores() -> None:
    assert [examination_of(mailbox).store for mailbox in (MemoryMailbox(), Racing(), Ignoring())] == [
        "atomic",
        "racy",
        "none",
    ]
