"""The one table: what each answer means, and that explanations quote nothing."""

import pytest

from gradientmail_core.errors import MailboxDenied, MailboxError, MailboxUnavailable, MailboxUnsupported
from gradientmail_core.mailbox.base import MailboxThrottled
from gradientmail_core.mailbox.objectstore.answers import Answer, Meaning, explained, meaning

TABLE = [
    (412, "PreconditionFailed", Meaning.TAKEN),
    (412, "", Meaning.TAKEN),
    (304, "", Meaning.TAKEN),
    (409, "ConditionalRequestConflict", Meaning.UNDECIDED),
    (409, "OperationAborted", Meaning.UNDECIDED),
    (409, "", Meaning.UNDECIDED),
    (409, "BlobAlreadyExists", Meaning.TAKEN),
    (404, "NoSuchKey", Meaning.MISSING),
    (404, "BlobNotFound", Meaning.MISSING),
    (404, "", Meaning.MISSING),
    (404, "NoSuchBucket", Meaning.DENIED),
    (404, "ContainerNotFound", Meaning.DENIED),
    (404, "NoSuchUpload", Meaning.UNDECIDED),
    (501, "NotImplemented", Meaning.UNSUPPORTED),
    (None, "", Meaning.UNDECIDED),
    (None, "ConnectTimeoutError", Meaning.UNDECIDED),
    (500, "InternalError", Meaning.UNDECIDED),
    (502, "", Meaning.UNDECIDED),
    (503, "SlowDown", Meaning.UNDECIDED),
    (504, "", Meaning.UNDECIDED),
    (429, "TooManyRequests", Meaning.UNDECIDED),
    (408, "", Meaning.UNDECIDED),
    (400, "RequestTimeout", Meaning.UNDECIDED),
    (400, "BadDigest", Meaning.UNDECIDED),
    (400, "IncompleteBody", Meaning.UNDECIDED),
    (400, "ExpiredToken", Meaning.EXPIRED),
    (403, "ExpiredToken", Meaning.EXPIRED),
    (403, "TokenRefreshRequired", Meaning.EXPIRED),
    (403, "AccessDenied", Meaning.DENIED),
    (403, "SignatureDoesNotMatch", Meaning.DENIED),
    (403, "RequestTimeTooSkewed", Meaning.DENIED),
    (401, "", Meaning.DENIED),
    (400, "InvalidArgument", Meaning.DENIED),
    (301, "PermanentRedirect", Meaning.DENIED),
    (405, "MethodNotAllowed", Meaning.DENIED),
]


@pytest.mark.parametrize(("status", "code", "expected"), TABLE)
def test_the_table(status: int | None, code: str, expected: Meaning) -> None:
    assert meaning(Answer(status, code)) is expected


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(503, "SlowDown"), MailboxUnavailable),
        (Answer(None, "ReadTimeoutError"), MailboxUnavailable),
        (Answer(409), MailboxUnavailable),
        (Answer(501, "NotImplemented"), MailboxUnsupported),
        (Answer(400, "ExpiredToken"), MailboxDenied),
        (Answer(404, "NoSuchBucket"), MailboxDenied),
        (Answer(403, "RequestTimeTooSkewed"), MailboxDenied),
        (Answer(403, "AccessDenied"), MailboxDenied),
        (Answer(404), MailboxDenied),
        (Answer(412), MailboxDenied),
    ],
)
def test_each_meaning_has_its_error(answer: Answer, error: type[MailboxError]) -> None:
    found = explained(answer, "PUT a/b at s3://bucket/run")
    assert type(found) is error
    assert "PUT a/b at s3://bucket/run" in found.cause and str(answer) in found.cause
    assert found.remedy or error is MailboxUnavailable


def test_a_wait_that_the_store_asks_for_is_passed_on() -> None:
    found = explained(Answer(429, "", 17.0), "GET a")
    assert isinstance(found, MailboxThrottled)
    assert found.seconds == 17.0


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("NoSuchBucket", "bucket"),
        ("RequestTimeTooSkewed", "clock"),
        ("PermanentRedirect", "region"),
        ("Odd", "permissions"),
    ],
)
def test_the_remedy_fits_the_code(code: str, word: str) -> None:
    assert word in explained(Answer(403, code), "GET a").remedy
