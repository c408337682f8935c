"""What an object store's answer means: one table for every backend.

412 is lost. 409 is undecided: S3 says so while another write to the key is in flight. 304 stands for 412
on some MinIO releases. 501 is a store that knows no conditions. Silence, resets, throttling and 5xx say
nothing about the request. A missing bucket is not a missing object. What a store says in words reaches
the user only as status and code, because error documents quote credentials and signatures.
"""

import enum
from dataclasses import dataclass
from typing import assert_never

from gradientmail_core.errors import MailboxDenied, MailboxError, MailboxUnavailable, MailboxUnsupported
from gradientmail_core.mailbox.base import MailboxThrottled


class Meaning(enum.Enum):
    """What to conclude from an answer that is not a success."""

    TAKEN = "an object was there already"
    MISSING = "there is no such object"
    UNDECIDED = "the request may have been done, or may yet be"
    EXPIRED = "the credentials are too old"
    UNSUPPORTED = "the store cannot do this"
    DENIED = "the store will not do this"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's HTTP status (None: none arrived), the store's error code, and the wait it asks for in seconds."""

    status: int | None
    code: str = ""
    retry_after: float = 0.0

    def __str__(self) -> str:
        return " ".join(part for part in (str(self.status or ""), self.code) if part) or "no answer"


_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_NO_CONTAINER = frozenset({"NoSuchBucket", "ContainerNotFound", "AllAccessDisabled"})
_TAKEN_DESPITE_409 = frozenset({"BlobAlreadyExists"})
_PASSING_DESPITE_4XX = frozenset(
    {"BadDigest", "IncompleteBody", "NoSuchUpload", "RequestTimeout", "SlowDown", "XAmzContentSHA256Mismatch"}
)
_REMEDIES = {
    "AccessDenied": "The credentials need permission to read, write, list and delete below the prefix.",
    "AuthorizationHeaderMalformed": "Name the bucket's region.",
    "ContainerNotFound": "Create the container, or check its name.",
    "IllegalLocationConstraintException": "Name the bucket's region.",
    "InvalidAccessKeyId": "Check the access key, and that it belongs to this store.",
    "NoCredentials": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE.",
    "NoSuchBucket": "Create the bucket, or check its name, region and endpoint.",
    "PermanentRedirect": "Name the bucket's region.",
    "RequestTimeTooSkewed": "Set this machine's clock.",
    "StrangeKey": "Remove the objects below the prefix whose names have empty or dotted segments.",
    "SignatureDoesNotMatch": "Check the secret key, the region and the endpoint.",
}
_DEFAULT_REMEDY = "Check bucket, credentials, permissions and endpoint."


def meaning(answer: Answer) -> Meaning:
    """The one table; successes never come here."""
    if answer.code in _EXPIRED:
        return Meaning.EXPIRED
    if answer.code in _PASSING_DESPITE_4XX or answer.status is None:
        return Meaning.UNDECIDED
    match answer.status:
        case 304 | 412:
            return Meaning.TAKEN
        case 409:
            return Meaning.TAKEN if answer.code in _TAKEN_DESPITE_409 else Meaning.UNDECIDED
        case 404:
            return Meaning.DENIED if answer.code in _NO_CONTAINER else Meaning.MISSING
        case 501:
            return Meaning.UNSUPPORTED
        case 408 | 425 | 429:
            return Meaning.UNDECIDED
        case status:
            return Meaning.UNDECIDED if status >= 500 else Meaning.DENIED


def explained(answer: Answer, request: str) -> MailboxError:
    """The error for an answer that no caller turned into a result; ``request`` names verb, key and store."""
    match meaning(answer):
        case Meaning.UNDECIDED if answer.retry_after > 0:
            return MailboxThrottled(f"{request}: {answer}.", answer.retry_after)
        case Meaning.UNDECIDED:
            return MailboxUnavailable(f"{request}: {answer}.")
        case Meaning.UNSUPPORTED:
            return MailboxUnsupported(f"{request}: {answer}; this store lacks the operation.", "Use another store.")
        case Meaning.EXPIRED:
            return MailboxDenied(f"{request}: the credentials have expired ({answer}).", "Renew them and start again.")
        case Meaning.TAKEN | Meaning.MISSING | Meaning.DENIED:
            return MailboxDenied(f"{request}: refused ({answer}).", _REMEDIES.get(answer.code, _DEFAULT_REMEDY))
        case unknown:
            assert_never(unknown)
