"""S3, Google Cloud Storage and Azure through obstore, whose requests run on threads of its own.

Its errors are classes for the common cases and words for the rest; the status in the words decides, since
a 409 that settles nothing arrives as the same class as a 412. Its listings fail on names that no key of
ours has; on S3 they are asked for in :mod:`gradientmail_core.mailbox.objectstore.listing` instead.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from gradientmail_core.errors import MailboxUnsupported, PayloadTooLarge
from gradientmail_core.mailbox.base import Body, Entry
from gradientmail_core.mailbox.objectstore.answers import Answer
from gradientmail_core.mailbox.objectstore.credentials import CredentialSource
from gradientmail_core.mailbox.objectstore.listing import ListingPage, listing_page
from gradientmail_core.mailbox.objectstore.location import S3Location
from gradientmail_core.mailbox.objectstore.signed import Refused
from gradientmail_core.mailbox.objectstore.uploads import UPLOADS_UNLISTED, abandoned_uploads, part_bytes
from gradientmail_core.mailbox.surroundings import Abandoned

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, RetryConfig, S3Config, S3Credential, S3CredentialProvider

AskForPage: TypeAlias = Callable[[str, str, str], ListingPage]
"""Prefix, path to begin after, token of the page; blocks."""
AskForUploads: TypeAlias = Callable[[str, float, bool], Abandoned]
"""Prefix, age in seconds, whether to abort them; blocks."""

PART = 8 << 20
PARTS_AT_ONCE = 4
LIST_PAGE = 1000

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_NO_ROLE = "169.254.169.254"
_CLIENT: "ClientConfig" = {"connect_timeout": "5s", "timeout": "5m", "allow_http": True}
_RETRY: "RetryConfig" = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}


def s3_transport(location: S3Location, credentials: CredentialSource | None) -> "ObstoreTransport":
    """The bucket at ``location``."""
    store = s3_store(location, credentials)
    if credentials is None:
        return ObstoreTransport(store)

    def ask(prefix: str, after: str, token: str) -> ListingPage:
        return listing_page(location, credentials.newest, prefix, after, token)

    def uploads(prefix: str, older_than: float, remove: bool) -> Abandoned:
        return abandoned_uploads(location, credentials.newest, prefix, older_than, remove)

    return ObstoreTransport(store, ask, uploads)


def s3_store(location: S3Location, credentials: CredentialSource | None) -> ObjectStore:
    """The bucket, with credentials looked up for every request."""
    config: S3Config = {
        "virtual_hosted_style_request": not location.path_style,
        "unsigned_payload": True,
        "disable_bulk_delete": True,
    }
    if location.endpoint_url is not None:
        config["endpoint"] = location.endpoint_url
    if location.region is not None:
        config["region"] = location.region
    provider = _provider(credentials) if credentials else None
    return S3Store(
        location.bucket, config=config, client_options=_CLIENT, retry_config=_RETRY, credential_provider=provider
    )


def google_store(bucket: str) -> ObjectStore:
    """A bucket, with the credentials that Google's own libraries would find."""
    return GCSStore(bucket, client_options=_CLIENT, retry_config=_RETRY)


def azure_store(
    container: str, account: str | None, endpoint_url: str | None = None, *, skip_signature: bool = False
) -> ObjectStore:
    """A container, with the credentials of the AZURE_* variables or a managed identity."""
    config: AzureConfig = {"skip_signature": skip_signature}
    if account is not None:
        config["account_name"] = account
    if endpoint_url is not None:
        config["endpoint"] = endpoint_url
    return AzureStore(container, config=config, client_options=_CLIENT, retry_config=_RETRY)


class ObstoreTransport:
    """One bucket or container. ``ask`` makes listings and ``uploads`` finds unfinished ones, where obstore cannot."""

    def __init__(self, store: ObjectStore, ask: AskForPage | None = None, uploads: AskForUploads | None = None) -> None:
        self._store = store
        self._ask = ask
        self._uploads = uploads
        self._reached = False

    async def get(self, path: str, limit: int | None) -> bytes:
        if limit is not None and limit <= 2 * PART:
            return await self._whole(path, limit)
        return await self._in_ranges(path, limit)

    async def put(self, path: str, body: Body) -> None:
        part = part_bytes(memoryview(body).nbytes, PART)
        await obstore.put_async(self._store, path, body, chunk_size=part, max_concurrency=PARTS_AT_ONCE)
        self._reached = True

    async def create(self, path: str, body: Body) -> None:
        await obstore.put_async(self._store, path, bytes(body), mode="create", use_multipart=False)
        self._reached = True

    async def list(self, prefix: str, after: str) -> AsyncIterator[Sequence[Entry]]:
        token = ""
        while self._ask is not None:
            page = await asyncio.to_thread(self._ask, prefix, after, token)
            yield page.entries
            if not (token := page.token):
                return
        directory = prefix.rpartition("/")[0] or None
        async for objects in obstore.list(self._store, directory, offset=after or None, chunk_size=LIST_PAGE):
            self._reached = True
            yield [Entry(found["path"], found["size"], found["last_modified"].timestamp()) for found in objects]

    async def delete(self, path: str) -> None:
        await obstore.delete_async(self._store, path)
        self._reached = True

    async def abandoned(self, prefix: str, older_than: float, remove: bool) -> Abandoned:
        if self._uploads is None:
            raise MailboxUnsupported(*UPLOADS_UNLISTED)
        return await asyncio.to_thread(self._uploads, prefix, older_than, remove)

    async def close(self) -> None:
        """Nothing to release: connections close with the store."""

    def answer(self, error: Exception) -> Answer | None:
        words = str(error)
        status, code = _STATUS.search(words), _CODE.search(words)
        match error:
            case Refused():
                return error.answer
            case _ if status:
                return Answer(int(status[1]), code[1] if code else "")
            case FileNotFoundError():
                return Answer(404)
            case AlreadyExistsError():
                return Answer(412)
            case BaseError() if "redirect" in words:
                return Answer(301, "PermanentRedirect")
            case BaseError() if "path segment" in words or "illegal character" in words:
                return Answer(400, "StrangeKey")
            case BaseError() if _NO_ROLE in words and not self._reached:
                return Answer(401, "NoCredentials")
            case BaseError() | OSError() | TimeoutError():
                return Answer(None)
            case _:
                return None

    async def _whole(self, path: str, limit: int | None) -> bytes:
        result = await obstore.get_async(self._store, path)
        self._reached = True
        _check_size(path, result.meta["size"], limit)
        return bytes(await result.bytes_async())

    async def _in_ranges(self, path: str, limit: int | None) -> bytes:
        """The first range tells the size. Each request is short, so that one time-out fits all."""
        try:
            result = await obstore.get_async(self._store, path, options={"range": (0, PART)})
        except BaseError as error:
            words = str(error)
            if "status code: 416" not in words and "non-partial" not in words:
                raise
            return await self._whole(path, limit)  # an empty object has no first range, some servers have none at all
        self._reached = True
        size = result.meta["size"]
        _check_size(path, size, limit)
        turns = asyncio.Semaphore(PARTS_AT_ONCE)

        async def part(start: int) -> obstore.Bytes:
            async with turns:
                return await obstore.get_range_async(self._store, path, start=start, end=min(start + PART, size))

        first = await result.bytes_async()
        return b"".join([first, *await asyncio.gather(*map(part, range(PART, size, PART)))])


def _check_size(path: str, size: int, limit: int | None) -> None:
    if limit is not None and size > limit:
        raise PayloadTooLarge(f"{path} has {size} bytes, more than the {limit} expected of it.")


def _provider(credentials: CredentialSource) -> "S3CredentialProvider":
    """What the mailbox has looked up before the request; asked on obstore's threads, where no loop runs."""

    def provide() -> "S3Credential":
        found = credentials.newest
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.session_token,
            "expires_at": datetime.now(UTC),  # asked again for the next request
        }

    return provide
