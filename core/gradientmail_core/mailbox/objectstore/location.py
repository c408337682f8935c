"""Where an S3 bucket is and how it wants to be spoken to, as a value, and the presets that make one from a URL.

Stores that imitate S3 differ in four settings: the endpoint, the region, whether the bucket stands in the
host name or the path, and whether they accept the checksums that newer clients send unasked. Amazon
checks these; several others answer them with errors, so they get only what the protocol requires.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, get_args
from urllib.parse import parse_qsl, quote, urlsplit

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox.base import is_key

RequestChecksums: TypeAlias = Literal["when_required", "when_supported"]
Backend: TypeAlias = Literal["auto", "s3fs", "obstore"]

MAX_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class S3Location:
    """One prefix of one bucket. ``endpoint_url`` is None for Amazon; ``max_concurrency`` counts requests."""

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    request_checksums: RequestChecksums = "when_supported"
    path_style: bool = False
    equal_parts: bool = False
    max_concurrency: int = MAX_CONCURRENCY
    backend: Backend = "auto"

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``, with the endpoint if it is not Amazon's."""
        where = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        return where if self.endpoint_url is None else f"{where}?endpoint_url={quote(self.endpoint_url, safe=':/')}"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL in parts: ``path`` are its non-empty segments, ``query`` its settings."""

    scheme: str
    host: str
    path: tuple[str, ...]
    query: Mapping[str, str]


def s3_location(
    bucket: str,
    prefix: str = "",
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    request_checksums: RequestChecksums | None = None,
    max_concurrency: int = MAX_CONCURRENCY,
    backend: Backend = "auto",
) -> S3Location:
    """A checked location with the defaults of its kind; raises :class:`ConfigurationError`.

    AWS's variables for endpoint and region stand in for what is not given.
    """
    endpoint_url = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    _check_bucket(bucket)
    prefix = prefix.strip("/")
    _check(
        not prefix or is_key(prefix), f"The prefix {prefix[:80]!r} is no key.", "Use letters, digits, '.', '_', '-'."
    )
    _check(max_concurrency > 0, f"max_concurrency is {max_concurrency}.", "Allow one request at least.")
    _check_choice("request_checksums", request_checksums or "when_required", get_args(RequestChecksums))
    _check_choice("backend", backend, get_args(Backend))
    if endpoint_url:
        _check_endpoint(endpoint_url)
    elsewhere = bool(endpoint_url)
    return S3Location(
        bucket=bucket,
        prefix=prefix,
        endpoint_url=endpoint_url.rstrip("/") if endpoint_url else None,
        region=region or ("us-east-1" if elsewhere else None),
        request_checksums=request_checksums or ("when_required" if elsewhere else "when_supported"),
        path_style=elsewhere or "." in bucket,
        max_concurrency=max_concurrency,
        backend=backend,
    )


def parsed_url(url: str) -> StoreUrl:
    """The URL in parts; :class:`ConfigurationError`, without quoting it, if it holds credentials."""
    parts = urlsplit(url)
    _check(
        "@" not in parts.netloc,
        f"The {parts.scheme}:// URL holds credentials, which would end up in logs.",
        "Give them in the environment or the store's configuration files.",
    )
    path = tuple(segment for segment in parts.path.split("/") if segment)
    return StoreUrl(parts.scheme.lower(), parts.netloc, path, dict(parse_qsl(parts.query, keep_blank_values=True)))


def location_from_url(url: str) -> S3Location:
    """The location that an ``s3``, ``r2``, ``minio``, ``ceph`` or ``hf`` URL names."""
    parts = parsed_url(url)
    _check(parts.scheme in PRESETS, f"No S3 store has the scheme {parts.scheme!r}.", f"Known: {', '.join(PRESETS)}.")
    return PRESETS[parts.scheme](parts)


def _s3(url: StoreUrl) -> S3Location:
    return _with_query(url, url.host, url.path, None)


def _r2(url: StoreUrl) -> S3Location:
    _check_depth(url, "r2://account/bucket/prefix")
    location = _with_query(url, url.path[0], url.path[1:], f"https://{url.host}.r2.cloudflarestorage.com", "auto")
    return replace(location, equal_parts=True)


def _hugging_face(url: StoreUrl) -> S3Location:
    _check_depth(url, "hf://namespace/bucket/prefix")
    return _with_query(url, url.path[0], url.path[1:], f"https://s3.hf.co/{url.host}", "us-east-1")


def _own_server(url: StoreUrl) -> S3Location:
    _check_depth(url, f"{url.scheme}://host:port/bucket/prefix")
    tls = url.query.get("tls", "true")
    _check_choice("tls", tls, ("true", "false"))
    settings = {name: value for name, value in url.query.items() if name != "tls"}
    endpoint = f"{'https' if tls == 'true' else 'http'}://{url.host}"
    return _with_query(replace(url, query=settings), url.path[0], url.path[1:], endpoint)


PRESETS: Mapping[str, Callable[[StoreUrl], S3Location]] = {
    "s3": _s3,
    "r2": _r2,
    "hf": _hugging_face,
    "minio": _own_server,
    "ceph": _own_server,
}


def _with_query(
    url: StoreUrl, bucket: str, prefix: tuple[str, ...], endpoint_url: str | None, region: str | None = None
) -> S3Location:
    known = ("endpoint_url", "region", "request_checksums", "max_concurrency", "backend")
    unknown = sorted(set(url.query) - set(known))
    _check(not unknown, f"The {url.scheme}:// URL sets {', '.join(unknown)}.", f"Known settings: {', '.join(known)}.")
    count = url.query.get("max_concurrency", str(MAX_CONCURRENCY))
    _check(count.isascii() and count.isdigit(), f"max_concurrency={count} is no number.", "Give a whole number.")
    return s3_location(
        bucket,
        "/".join(prefix),
        endpoint_url=url.query.get("endpoint_url", endpoint_url),
        region=url.query.get("region", region),
        request_checksums=cast(RequestChecksums | None, url.query.get("request_checksums")),
        max_concurrency=int(count),
        backend=cast(Backend, url.query.get("backend", "auto")),
    )


def _check_depth(url: StoreUrl, form: str) -> None:
    _check(bool(url.host) and bool(url.path), f"The {url.scheme}:// URL names no bucket.", f"Write {form}.")


def _check_bucket(bucket: str) -> None:
    _check(is_key(bucket) and "/" not in bucket, f"{bucket[:80]!r} is no bucket name.", "Write s3://bucket/prefix.")


def _check_endpoint(endpoint_url: str) -> None:
    parts = urlsplit(endpoint_url)
    _check("@" not in parts.netloc, "The endpoint URL holds credentials.", "Give them in the environment.")
    plain = parts.scheme in ("http", "https") and bool(parts.netloc) and not parts.query and not parts.fragment
    _check(plain, "The endpoint URL is not of the form http(s)://host:port.", "Write the scheme and the host.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    _check(value in choices, f"{name} is {value!r}.", f"It is one of {', '.join(choices)}.")


def _check(holds: bool, cause: str, remedy: str) -> None:
    if not holds:
        raise ConfigurationError(cause, remedy)
