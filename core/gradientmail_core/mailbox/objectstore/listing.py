"""S3's LIST, asked and read here, for the backend that cannot pass over a stranger's object.

obstore refuses a whole page when one key on it has an empty segment, ``..`` or a control character, so
anybody who may write to the bucket could blind a run. The request is signed by AWS Signature Version 4
(docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html) and the answer's size is bounded.
"""

import hashlib
import hmac
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol
from urllib.parse import quote, unquote_plus, urlsplit
from xml.etree import ElementTree

from gradientmail_core.mailbox.base import Entry
from gradientmail_core.mailbox.objectstore.answers import Answer
from gradientmail_core.mailbox.objectstore.credentials import Credentials
from gradientmail_core.mailbox.objectstore.location import S3Location

ANSWER_LONGEST = 16 << 20  # bytes: a thousand keys of a thousand escaped characters, and as much again
TIMEOUT_SECONDS = 30.0
_NO_BODY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class ListingPage:
    """Up to a thousand objects by full path, and the token of the next page, empty on the last."""

    entries: tuple[Entry, ...]
    token: str


class ListingRefused(Exception):
    """The store's answer was no listing."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(str(answer))
        self.answer = answer


class Opener(Protocol):
    """What sends the request; ``urllib.request.urlopen`` by default, which knows the system's proxies."""

    def __call__(self, request: urllib.request.Request, *, timeout: float) -> "Response": ...


class Response(Protocol):
    """An answer that can be read."""

    def read(self, size: int) -> bytes: ...
    def close(self) -> None: ...


def listing_page(
    location: S3Location, credentials: Credentials, prefix: str, after: str, token: str, send: Opener | None = None
) -> ListingPage:
    """One page of ``list-type=2``. Blocks; raises :class:`ListingRefused` or :class:`OSError`."""
    query = {"encoding-type": "url", "list-type": "2", "prefix": prefix}
    query |= {"start-after": after} if after else {}
    query |= {"continuation-token": token} if token else {}
    request = signed_request(location, credentials, query, datetime.now(UTC))
    try:
        response = (send or urllib.request.urlopen)(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        raise ListingRefused(Answer(error.code, _code(error.read(1 << 16)))) from None
    try:
        return parsed_page(response.read(ANSWER_LONGEST))
    finally:
        response.close()


def signed_request(
    location: S3Location, credentials: Credentials, query: dict[str, str], now: datetime
) -> urllib.request.Request:
    """A GET of the bucket with ``query``, signed for ``now``."""
    address = bucket_address(location)
    parts = urlsplit(address)
    path = quote(parts.path or "/", safe="/-_.~")
    arguments = "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items())
    )
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": parts.netloc, "x-amz-content-sha256": _NO_BODY, "x-amz-date": stamp}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    canonical = "\n".join(["GET", path, arguments, *lines, "", names, _NO_BODY])
    scope = f"{stamp[:8]}/{_region(location)}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signature = hmac.new(_signing_key(credentials.secret_key, scope), text.encode(), hashlib.sha256).hexdigest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return urllib.request.Request(f"{parts.scheme}://{parts.netloc}{path}?{arguments}", headers=headers)


def bucket_address(location: S3Location) -> str:
    """The bucket's URL, in path or host style."""
    region = _region(location)
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    endpoint = location.endpoint_url or f"https://s3.{region}.{domain}"
    if location.path_style:
        return f"{endpoint}/{location.bucket}"
    scheme, _, host = endpoint.partition("://")
    return f"{scheme}://{location.bucket}.{host}/"


def parsed_page(document: bytes) -> ListingPage:
    """The page in an answer; :class:`ListingRefused` for anything that is no listing."""
    try:
        root = ElementTree.fromstring(document)
        entries = tuple(_entry(found) for found in root.iterfind("{*}Contents"))
        more = root.findtext("{*}IsTruncated", "false") == "true"
        return ListingPage(entries, root.findtext("{*}NextContinuationToken", "") if more else "")
    except (ElementTree.ParseError, ValueError) as error:
        raise ListingRefused(Answer(None, "MalformedListing")) from error


def _entry(found: ElementTree.Element) -> Entry:
    return Entry(unquote_plus(found.findtext("{*}Key", "")), int(found.findtext("{*}Size", "0")))


def _code(document: bytes) -> str:
    try:
        code = ElementTree.fromstring(document).findtext("{*}Code", "")
    except ElementTree.ParseError:
        return ""
    return code if code.isalnum() else ""


def _region(location: S3Location) -> str:
    return location.region or "us-east-1"


def _signing_key(secret: str, scope: str) -> bytes:
    key = b"AWS4" + secret.encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
