"""Single requests of the S3 API, signed and read here, for what the client libraries lack.

They are signed by AWS Signature Version 4 (docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html).
An answer's size is bounded, and of a refusal only status and code are kept, because its words quote credentials.
"""

import hashlib
import hmac
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from gradientmail_core.mailbox.objectstore.answers import Answer
from gradientmail_core.mailbox.objectstore.credentials import Credentials
from gradientmail_core.mailbox.objectstore.location import S3Location

ANSWER_LONGEST = 16 << 20  # bytes: a thousand keys of a thousand escaped characters, and as much again
TIMEOUT_SECONDS = 30.0
_NO_BODY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Asked:
    """A successful answer: its body, and its ``Date`` header, empty if it has none."""

    body: bytes
    date: str


class Refused(Exception):
    """The store's answer was not what was asked for."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(str(answer))
        self.answer = answer


class Response(Protocol):
    """An answer that can be read."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Its header fields."""
        ...

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes of its body."""
        ...

    def close(self) -> None:
        """Release the connection."""
        ...


class Opener(Protocol):
    """What sends the request; ``urllib.request.urlopen`` by default, which knows the system's proxies."""

    def __call__(self, request: urllib.request.Request, *, timeout: float) -> Response:
        """Send it and return the answer."""
        ...


def asked(
    location: S3Location,
    credentials: Credentials,
    query: dict[str, str],
    *,
    method: str = "GET",
    key: str = "",
    send: Opener | None = None,
) -> Asked:
    """The answer to one request of the bucket, or of one object. Blocks; raises :class:`Refused` or OSError."""
    request = signed_request(location, credentials, query, datetime.now(UTC), method=method, key=key)
    try:
        response = (send or urllib.request.urlopen)(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        raise Refused(Answer(error.code, _code(error.read(1 << 16)))) from None
    try:
        return Asked(response.read(ANSWER_LONGEST), str(response.headers.get("Date") or ""))
    finally:
        response.close()


def signed_request(
    location: S3Location,
    credentials: Credentials,
    query: dict[str, str],
    now: datetime,
    *,
    method: str = "GET",
    key: str = "",
) -> urllib.request.Request:
    """A request without a body for the bucket, or for ``key`` in it, signed for ``now``."""
    parts = urlsplit(bucket_address(location))
    where = f"{parts.path.rstrip('/')}/{key}" if key else parts.path or "/"
    path = quote(where, safe="/-_.~")
    arguments = "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items())
    )
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": parts.netloc, "x-amz-content-sha256": _NO_BODY, "x-amz-date": stamp}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    canonical = "\n".join([method, path, arguments, *lines, "", names, _NO_BODY])
    scope = f"{stamp[:8]}/{_region(location)}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signature = hmac.new(_signing_key(credentials.secret_key, scope), text.encode(), hashlib.sha256).hexdigest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    url = f"{parts.scheme}://{parts.netloc}{path}?{arguments}"
    return urllib.request.Request(url, headers=headers, method=method)


def bucket_address(location: S3Location) -> str:
    """The bucket's URL, in path or host style."""
    region = _region(location)
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    endpoint = location.endpoint_url or f"https://s3.{region}.{domain}"
    if location.path_style:
        return f"{endpoint}/{location.bucket}"
    scheme, _, host = endpoint.partition("://")
    return f"{scheme}://{location.bucket}.{host}/"


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
