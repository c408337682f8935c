"""An examination ends, cleans up, and its verdict follows from its findings."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from gradientmail_core.errors import MailboxDenied, MailboxUnavailable
from gradientmail_core.mailbox import Entry, Mailbox, MemoryMailbox
from gradientmail_core.mailbox.checks import Examine
from gradientmail_core.mailbox.examination import DOCTOR, Check, Examination, Finding, Patient, advice, examined
from tests.core.mailbox.virtual import run_virtually


def examine(handles: Sequence[Mailbox], *checks: Check) -> tuple[Examination, list[str]]:
    told: list[str] = []

    async def work(clock: Any) -> Examination:
        return await examined(handles, clock, checks, size=10, races=1, tell=told.append)

    return run_virtually(work), told


async def good(patient: Patient) -> Finding:
    await patient.handles[0].put(f"{patient.prefix}/left", b"x")
    return Finding("good", "good", "seen", store="atomic")


async def bad(patient: Patient) -> Finding:
    return Finding("bad", "bad", "seen")


async def refused(patient: Patient) -> Finding:
    raise MailboxDenied("PUT a: refused (403).", "Ask for permission.")


async def silent(patient: Patient) -> Finding:
    await patient.handles[0].get("a")
    raise AssertionError("the store does not answer")


class Down(MemoryMailbox):
    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        raise MailboxUnavailable("GET a: 503.")


class Undeletable(MemoryMailbox):
    async def delete(self, key: str) -> None:
        raise MailboxDenied("DELETE: refused (403).")


def test_everything_it_wrote_is_removed() -> None:
    mailbox = MemoryMailbox()
    asyncio.run(mailbox.put("others/a", b""))
    examination, told = examine([mailbox], Examine("good", good), Examine("bad", bad))
    assert asyncio.run(keys(mailbox)) == ["others/a"]
    assert told == ["good", "bad", "cleaning up"]
    assert (examination.verdict, examination.store) == ("unfit", "atomic")


def test_an_essential_check_ends_it() -> None:
    examination, _ = examine([MemoryMailbox()], Examine("refused", refused, essential=True), Examine("good", good))
    (finding,) = examination.findings
    assert (finding.grade, finding.observation) == ("bad", "PUT a: refused (403).")
    assert finding.remedy == "Ask for permission."


def test_a_store_that_does_not_answer_is_given_up_with_its_last_fault() -> None:
    examination, _ = examine([Down()], Examine("silent", silent))
    (finding,) = examination.findings
    assert finding.grade == "bad" and "GET a: 503." in finding.observation


def test_what_cannot_be_removed_is_said() -> None:
    examination, _ = examine([Undeletable()], Examine("good", good))
    assert examination.findings[-1].check == "cleaning up"
    assert DOCTOR in examination.findings[-1].observation


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([Finding("a", "good", "", store="atomic")], "fit"),
        ([Finding("a", "caution", "", store="atomic"), Finding("b", "unknown", "")], "fit"),
        ([Finding("a", "caution", "", store="racy")], "limited"),
        ([Finding("a", "caution", "", store="none")], "limited"),
        ([Finding("a", "good", "")], "limited"),
        ([Finding("a", "good", "", store="atomic"), Finding("b", "bad", "")], "unfit"),
    ],
)
def test_verdicts(findings: list[Finding], verdict: str) -> None:
    examination = Examination("memory://x", tuple(findings))
    assert examination.verdict == verdict
    assert advice(examination).endswith(".")
    assert json.loads(json.dumps(examination.as_json()))["verdict"] == verdict


async def keys(mailbox: Mailbox) -> list[str]:
    listing: AsyncIterator[Entry] = mailbox.list("")
    return [entry.key async for entry in listing]
