"""Multipart uploads that a crash left unfinished: S3 keeps and bills their parts, and shows them in no listing.

How old one is, is judged by the store's own clock, since both times come from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from xml.etree import ElementTree

from gradientmail_core.mailbox.objectstore.answers import Answer
from gradientmail_core.mailbox.objectstore.credentials import Credentials
from gradientmail_core.mailbox.objectstore.location import S3Location
from gradientmail_core.mailbox.objectstore.signed import Opener, Refused, asked
from gradientmail_core.mailbox.surroundings import Abandoned

UPLOADS_UNLISTED = (
    "Unfinished uploads cannot be listed here.",
    "Give the bucket a lifecycle rule that aborts them; Azure forgets them after a week by itself.",
)


PARTS_MOST = 10_000
"""What S3, and who speaks it, allows of an upload."""


def part_bytes(size: int, usual: int) -> int:
    """The size of the parts of an upload of ``size`` bytes: ``usual``, or so much that the parts are few enough.

    So a body may be as large as a store's largest object (5 TiB on S3), whatever part suits a usual one.
    """
    return max(usual, -(-size // PARTS_MOST))


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that was begun; ``age`` in seconds by the store's clock."""

    key: str
    id: str
    age: float


def abandoned_uploads(
    location: S3Location,
    credentials: Credentials,
    prefix: str,
    older_than: float,
    remove: bool,
    send: Opener | None = None,
) -> Abandoned:
    """Uploads below ``prefix`` that are ``older_than`` seconds old or more; ``remove`` aborts them. Blocks.

    Raises :class:`Refused` or :class:`OSError`. One page of a thousand uploads at a call, and of each upload's size
    the first thousand parts.
    """
    found = asked(location, credentials, {"uploads": "", "prefix": prefix}, send=send)
    uploads = parsed_uploads(found.body, found.date)
    old = [each for each in uploads if each.age >= older_than and each.key.startswith(prefix)]
    size = 0
    for each in old:
        parts = asked(location, credentials, {"uploadId": each.id}, key=each.key, send=send)
        size += parsed_parts(parts.body)
        if remove:
            asked(location, credentials, {"uploadId": each.id}, method="DELETE", key=each.key, send=send)
    return Abandoned(len(old), size)


def parsed_parts(document: bytes) -> int:
    """The bytes of the parts in an answer; :class:`Refused` for anything else."""
    try:
        return sum(int(part.findtext("{*}Size", "0")) for part in ElementTree.fromstring(document).iterfind("{*}Part"))
    except (ElementTree.ParseError, ValueError) as error:
        raise Refused(Answer(None, "MalformedListing")) from error


def parsed_uploads(document: bytes, date: str) -> tuple[Upload, ...]:
    """The uploads in an answer of that ``Date``; :class:`Refused` for anything else."""
    try:
        return tuple(_uploads(ElementTree.fromstring(document), parsedate_to_datetime(date)))
    except (ElementTree.ParseError, TypeError, ValueError) as error:
        raise Refused(Answer(None, "MalformedListing")) from error


def _uploads(root: ElementTree.Element, now: datetime) -> Iterator[Upload]:
    for found in root.iterfind("{*}Upload"):
        begun = datetime.fromisoformat(found.findtext("{*}Initiated", "").replace("Z", "+00:00"))
        age = (now - begun) / timedelta(seconds=1)
        yield Upload(found.findtext("{*}Key", ""), found.findtext("{*}UploadId", ""), age)
