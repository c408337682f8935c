"""Object stores by name: which library serves which URL, and what to install where none does."""

import importlib.util
import os
from dataclasses import replace

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox.objectstore.bucket import bucket_surroundings, clock_offset
from gradientmail_core.mailbox.objectstore.credentials import (
    CredentialProvider,
    CredentialSource,
    chain_provider,
    configured_region,
)
from gradientmail_core.mailbox.objectstore.location import (
    MAX_CONCURRENCY,
    PRESETS,
    Backend,
    RequestChecksums,
    S3Location,
    StoreUrl,
    location_from_url,
    parsed_url,
    s3_location,
)
from gradientmail_core.mailbox.objectstore.objects import ObjectMailbox, Transport
from gradientmail_core.mailbox.objectstore.signed import bucket_address
from gradientmail_core.mailbox.surroundings import Surroundings

_GOOGLE = ("gs", "gcs")
_AZURE = ("az", "abfs", "abfss")
_CLOUD_BACKENDS = ("auto", "obstore", "fsspec")


class S3Mailbox(ObjectMailbox):
    """A prefix of an S3 bucket, or of a store that speaks S3.

    ``endpoint_url`` is None for Amazon. ``request_checksums`` defaults to what the store is known to accept.
    ``max_concurrency`` bounds the requests in flight. ``credential_provider`` returns :class:`Credentials` (or a
    coroutine of them); without it the usual environment, profile and role are searched. ``backend`` is obstore
    where it is installed, else s3fs. Raises :class:`ConfigurationError` for settings that cannot work.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        request_checksums: RequestChecksums | None = None,
        max_concurrency: int = MAX_CONCURRENCY,
        credential_provider: CredentialProvider | None = None,
        backend: Backend = "auto",
    ) -> None:
        self._open(
            s3_location(
                bucket,
                prefix,
                endpoint_url=endpoint_url,
                region=region,
                request_checksums=request_checksums,
                max_concurrency=max_concurrency,
                backend=backend,
            ),
            credential_provider,
        )

    @classmethod
    def at(cls, location: S3Location, credential_provider: CredentialProvider | None = None) -> "S3Mailbox":
        """The mailbox at a location made elsewhere, such as by a preset."""
        mailbox = cls.__new__(cls)
        mailbox._open(location, credential_provider)
        return mailbox

    def _open(self, location: S3Location, provider: CredentialProvider | None) -> None:
        provider = provider or chain_provider()
        if location.region is None:
            location = replace(location, region=configured_region())
        credentials = CredentialSource(provider) if provider else None
        super().__init__(
            _s3_transport(location, credentials),
            location.url,
            location.prefix,
            max_concurrency=location.max_concurrency,
            credentials=credentials,
            describe=lambda: _bucket_said(location, credentials),
        )


def _bucket_said(location: S3Location, credentials: CredentialSource | None) -> Surroundings:
    if credentials is None:
        return Surroundings(clock_offset=clock_offset(bucket_address(location)))
    return bucket_surroundings(location, credentials.newest)


def open_object_store(url: str) -> ObjectMailbox:
    """The object store at ``url``; :class:`ConfigurationError` names the extra to install if one is missing."""
    parts = parsed_url(url)
    if parts.scheme in PRESETS:
        return S3Mailbox.at(location_from_url(url))
    if not parts.host:
        raise ConfigurationError(
            f"The {parts.scheme}:// URL names no bucket.", f"Write {parts.scheme}://bucket/prefix."
        )
    _check_settings(parts)
    where, prefix = f"{parts.scheme}://{parts.host}/{'/'.join(parts.path)}".rstrip("/"), "/".join(parts.path)
    return ObjectMailbox(
        _transport(parts), where, prefix, max_concurrency=MAX_CONCURRENCY, describe=lambda: _cloud_said(parts)
    )


def _cloud_said(url: StoreUrl) -> Surroundings:
    """The clock of Google's or Azure's servers; they tell nothing more without libraries of their own."""
    account = url.query.get("account") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if url.scheme in _GOOGLE:
        return Surroundings(clock_offset=clock_offset("https://storage.googleapis.com/"))
    if url.scheme in _AZURE and (account or "endpoint_url" in url.query):
        address = url.query.get("endpoint_url") or f"https://{account}.blob.core.windows.net/"
        return Surroundings(clock_offset=clock_offset(address))
    return Surroundings()


def _s3_transport(location: S3Location, credentials: CredentialSource | None) -> Transport:
    backend = location.backend if location.backend != "auto" else "obstore" if _installed("obstore") else "s3fs"
    if backend == "obstore" and _installed("obstore"):
        from gradientmail_core.mailbox.objectstore.obstore import s3_transport

        return s3_transport(location, credentials)
    if backend == "s3fs" and _installed("s3fs"):
        from gradientmail_core.mailbox.objectstore.s3fs import S3fsTransport

        assert credentials is not None
        return S3fsTransport(location, credentials)
    raise ConfigurationError(
        f"s3:// needs {backend}, which is not installed.", "pip install 'gradientmail[obstore]' or 'gradientmail[s3]'."
    )


def _transport(url: StoreUrl) -> Transport:
    backend = url.query.get("backend", "auto")
    cloud = url.scheme in (*_GOOGLE, *_AZURE)
    if cloud and backend in ("auto", "obstore") and _installed("obstore"):
        from gradientmail_core.mailbox.objectstore import obstore

        if url.scheme in _GOOGLE:
            return obstore.ObstoreTransport(obstore.google_store(url.host))
        return obstore.ObstoreTransport(
            obstore.azure_store(url.host, url.query.get("account"), url.query.get("endpoint_url"))
        )
    library, extra = ("gcsfs", "gcs") if url.scheme in _GOOGLE else ("adlfs", "azure")
    if cloud and (backend == "obstore" or not _installed(library)):
        raise ConfigurationError(
            f"{url.scheme}:// needs a library that is not installed.",
            f"pip install 'gradientmail[obstore]' or 'gradientmail[{extra}]'.",
        )
    from gradientmail_core.mailbox.objectstore.fsspec import FsspecTransport, azure_settings, open_file_system

    settings = azure_settings(url.query) if url.scheme in _AZURE else dict(url.query) if not cloud else {}
    return FsspecTransport(open_file_system(url.scheme, **settings), url.scheme, url.host)


def _check_settings(url: StoreUrl) -> None:
    """Clouds have few settings of their own; whatever else fsspec serves may have any."""
    if url.scheme not in (*_AZURE, *_GOOGLE):
        return
    known = ("account", "endpoint_url", "backend") if url.scheme in _AZURE else ("backend",)
    if unknown := sorted(set(url.query) - set(known)):
        raise ConfigurationError(
            f"The {url.scheme}:// URL sets {', '.join(unknown)}.", f"Known settings: {', '.join(known)}."
        )
    if url.query.get("backend", "auto") not in _CLOUD_BACKENDS:
        raise ConfigurationError(
            f"The {url.scheme}:// URL sets an unknown backend.", f"It is one of {', '.join(_CLOUD_BACKENDS)}."
        )


def _installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None
