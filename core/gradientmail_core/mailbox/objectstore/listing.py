"""S3's LIST, asked and read here, for the backend that cannot pass over a stranger's object.

obstore refuses a whole page when one key on it has an empty segment, ``..`` or a control character, so
anybody who may write to the bucket could blind a run.
"""

from dataclasses import dataclass
from datetime import datetime
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from gradientmail_core.mailbox.base import Entry
from gradientmail_core.mailbox.objectstore.answers import Answer
from gradientmail_core.mailbox.objectstore.credentials import Credentials
from gradientmail_core.mailbox.objectstore.location import S3Location
from gradientmail_core.mailbox.objectstore.signed import Opener, Refused, asked


@dataclass(frozen=True, slots=True)
class ListingPage:
    """Up to a thousand objects by full path, and the token of the next page, empty on the last."""

    entries: tuple[Entry, ...]
    token: str


def listing_page(
    location: S3Location, credentials: Credentials, prefix: str, after: str, token: str, send: Opener | None = None
) -> ListingPage:
    """One page of ``list-type=2``. Blocks; raises :class:`Refused` or :class:`OSError`."""
    query = {"encoding-type": "url", "list-type": "2", "prefix": prefix}
    query |= {"start-after": after} if after else {}
    query |= {"continuation-token": token} if token else {}
    return parsed_page(asked(location, credentials, query, send=send).body)


def parsed_page(document: bytes) -> ListingPage:
    """The page in an answer; :class:`Refused` for anything that is no listing."""
    try:
        root = ElementTree.fromstring(document)
        entries = tuple(_entry(found) for found in root.iterfind("{*}Contents"))
        more = root.findtext("{*}IsTruncated", "false") == "true"
        return ListingPage(entries, root.findtext("{*}NextContinuationToken", "") if more else "")
    except (ElementTree.ParseError, ValueError) as error:
        raise Refused(Answer(None, "MalformedListing")) from error


def _entry(found: ElementTree.Element) -> Entry:
    written = found.findtext("{*}LastModified")
    return Entry(
        unquote_plus(found.findtext("{*}Key", "")),
        int(found.findtext("{*}Size", "0")),
        datetime.fromisoformat(written.replace("Z", "+00:00")).timestamp() if written else None,
    )
