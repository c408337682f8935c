"""S3 through s3fs, on the caller's event loop.

s3fs finds the configuration and keeps the connection; the requests are made on its client, one for each
verb. Its file operations would add a HEAD before each GET, cache listings for ever, repeat a create whose
answer was lost and then call it taken, and turn large creates into multipart uploads, whose condition
several stores ignore. Large puts go in parallel parts and large gets in parallel ranges.
"""

import asyncio
import functools
import io
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Sequence
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeAlias, TypeVar

import aiohttp
import s3fs
from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError
from botocore.handlers import add_expect_header
from botocore.loaders import Loader, create_loader

from gradientmail_core.errors import PayloadTooLarge
from gradientmail_core.mailbox.base import Body, Entry
from gradientmail_core.mailbox.objectstore.answers import Answer
from gradientmail_core.mailbox.objectstore.credentials import CredentialSource
from gradientmail_core.mailbox.objectstore.location import S3Location
from gradientmail_core.mailbox.objectstore.uploads import part_bytes
from gradientmail_core.mailbox.surroundings import Abandoned

T = TypeVar("T")
Untyped: TypeAlias = Any  # what aiobotocore returns
Response: TypeAlias = Awaitable[dict[str, Untyped]]

PART = 16 << 20
PARTS_AT_ONCE = 4
RANGE = 32 << 20
IN_RANGES_FROM = 64 << 20
SMALL = 4 << 20
BUFFERED = 1 << 20
CONNECT_SECONDS, READ_SECONDS = 5, 30


class _Client(Protocol):
    """What is used of the client that s3fs keeps; arguments and answers are those of the S3 API."""

    def get_object(self, **query: object) -> Response: ...
    def put_object(self, **query: object) -> Response: ...
    def delete_object(self, **query: object) -> Response: ...
    def list_objects_v2(self, **query: object) -> Response: ...
    def create_multipart_upload(self, **query: object) -> Response: ...
    def upload_part(self, **query: object) -> Response: ...
    def complete_multipart_upload(self, **query: object) -> Response: ...
    def abort_multipart_upload(self, **query: object) -> Response: ...
    def list_multipart_uploads(self, **query: object) -> Response: ...
    def list_parts(self, **query: object) -> Response: ...
    def close(self) -> Awaitable[None]: ...


class S3fsTransport:
    """One bucket. Bound to the event loop of its first request."""

    def __init__(self, location: S3Location, credentials: CredentialSource) -> None:
        self._bucket = location.bucket
        session = AioSession()
        session._credentials = _Renewed(credentials)
        session.register_component("data_loader", _descriptions())
        # A body announced by "Expect: 100-continue" costs a round trip, and SeaweedFS stores an empty object
        # when the client goes away before it sends the body.
        session.unregister("before-call.s3", add_expect_header)
        self._files = s3fs.S3FileSystem(
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
            session=session,
            endpoint_url=location.endpoint_url,
            client_kwargs={"region_name": location.region} if location.region else {},
            config_kwargs=_client_settings(location),
        )

    async def get(self, path: str, limit: int | None) -> bytes:
        client = await self._client()
        response = await client.get_object(Bucket=self._bucket, Key=path)
        size: int = response["ContentLength"]
        async with response["Body"] as stream:
            if limit is not None and size > limit:
                raise PayloadTooLarge(f"{path} has {size} bytes, more than the {limit} expected of it.")
            if size <= IN_RANGES_FROM:
                return await _whole(stream, size)
        return await self._in_ranges(client, path, size)

    async def put(self, path: str, body: Body) -> None:
        client, view = await self._client(), memoryview(body).cast("B")
        if view.nbytes <= 2 * PART:
            await client.put_object(Bucket=self._bucket, Key=path, Body=io.BytesIO(view))
        else:
            await self._put_in_parts(client, path, view)

    async def create(self, path: str, body: Body) -> None:
        client = await self._client()
        await client.put_object(Bucket=self._bucket, Key=path, Body=bytes(body), IfNoneMatch="*")

    async def list(self, prefix: str, after: str) -> AsyncIterator[Sequence[Entry]]:
        client = await self._client()
        query = {"Bucket": self._bucket, "Prefix": prefix} | ({"StartAfter": after} if after else {})
        while True:
            page = await client.list_objects_v2(**query)
            yield [_entry(found) for found in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = page["NextContinuationToken"]

    async def delete(self, path: str) -> None:
        client = await self._client()
        await client.delete_object(Bucket=self._bucket, Key=path)

    async def abandoned(self, prefix: str, older_than: float, remove: bool) -> Abandoned:
        client = await self._client()
        found = await client.list_multipart_uploads(Bucket=self._bucket, Prefix=prefix)
        now = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        old = [upload for upload in found.get("Uploads", ()) if _age(upload, now) >= timedelta(seconds=older_than)]
        size = 0
        for upload in old:
            where = {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            size += sum(part["Size"] for part in (await client.list_parts(**where)).get("Parts", ()))
            if remove:
                await client.abort_multipart_upload(**where)
        return Abandoned(len(old), size)

    async def close(self) -> None:
        client = await self._client()
        await client.close()

    def answer(self, error: Exception) -> Answer | None:
        match error:
            case ClientError():
                return _client_answer(error)
            case NoCredentialsError():
                return Answer(401, "NoCredentials")
            case ParamValidationError():
                return None
            case BotoCoreError() | aiohttp.ClientError() | TimeoutError() | OSError():
                return Answer(None, type(error).__name__)
            case _:
                return None

    async def _client(self) -> _Client:
        client: _Client = await self._files.set_session()
        return client

    async def _in_ranges(self, client: _Client, path: str, size: int) -> bytes:
        """Several connections at once, since stores bound the rate of each."""
        turns, space = asyncio.Semaphore(PARTS_AT_ONCE), _space(size)

        async def part(start: int) -> None:
            stop = min(start + RANGE, size)
            async with turns:
                response = await client.get_object(Bucket=self._bucket, Key=path, Range=f"bytes={start}-{stop - 1}")
                async with response["Body"] as stream:
                    if response["ContentLength"] > stop - start:
                        raise PayloadTooLarge(f"{path}: the store sent more than the range that was asked for.")
                    await _received(stream, into[start:stop])

        with space.getbuffer() as into:
            await _all(part(start) for start in range(0, size, RANGE))
        return space.getvalue()

    async def _put_in_parts(self, client: _Client, path: str, view: memoryview) -> None:
        upload = await client.create_multipart_upload(Bucket=self._bucket, Key=path)
        where = {"Bucket": self._bucket, "Key": path, "UploadId": upload["UploadId"]}
        turns, size = asyncio.Semaphore(PARTS_AT_ONCE), part_bytes(view.nbytes, PART)

        async def part(number: int, start: int) -> dict[str, object]:
            async with turns:
                body = io.BytesIO(view[start : start + size])
                done = await client.upload_part(**where, PartNumber=number, Body=body)
                return {"PartNumber": number, "ETag": done["ETag"]}

        try:
            parts = await _all(part(*numbered) for numbered in enumerate(range(0, view.nbytes, size), 1))
            await client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})
        except BaseException:
            await asyncio.shield(_aborted(client, where))
            raise


class _Renewed(AioCredentials):  # type: ignore[misc]  # the base is untyped
    """The source's credentials, looked up for every request that is signed."""

    def __init__(self, source: CredentialSource) -> None:
        super().__init__("", "", method="gradientmail")
        self._source = source

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        found = await self._source.current()
        return ReadOnlyCredentials(found.access_key, found.secret_key, found.session_token, None)


@functools.cache
def _descriptions() -> Loader:
    """The API's description, read once per process: it takes longer than a request."""
    return create_loader()


def _client_settings(location: S3Location) -> dict[str, object]:
    """One attempt per request; bodies signed by neither client nor server, since records carry their sha256."""
    return {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "max_pool_connections": location.max_concurrency * PARTS_AT_ONCE,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "request_checksum_calculation": location.request_checksums,
        "response_checksum_validation": location.request_checksums,
        "tcp_keepalive": True,
        "s3": {
            "addressing_style": "path" if location.path_style else "virtual",
            "payload_signing_enabled": False,
        },
    }


async def _whole(stream: Untyped, size: int) -> bytes:
    """A body; small ones by the library's own ``read``, which checks the checksums that Amazon sends."""
    if size <= SMALL:
        small: bytes = await stream.read()
        return small
    space = _space(size)
    with space.getbuffer() as into:
        await _received(stream, into)
    return space.getvalue()


def _space(size: int) -> io.BytesIO:
    """Room for ``size`` bytes, which ``getvalue`` hands out as bytes without a copy."""
    space = io.BytesIO()
    space.seek(size - 1)
    space.write(b"\0")
    return space


async def _received(stream: Untyped, into: memoryview) -> None:
    """Fill ``into`` with a body as it comes from the socket.

    The library's own ``read`` joins what has arrived, and again when all has, which costs more than the transfer on
    one thread.
    """
    content, connection, place = stream.raw_stream.content, stream.raw_stream.connection, 0
    if hasattr(content, "set_read_chunk_size"):  # aiohttp from 3.14 on
        content.set_read_chunk_size(BUFFERED)
    if connection is not None and hasattr(connection.transport, "max_size"):
        connection.transport.max_size = BUFFERED  # of one recv; 256 KiB by default, and none of TLS
    with into:
        while place < len(into):
            chunk, _ = await content.readchunk()
            stop = place + len(chunk)
            if stop > len(into) or (not chunk and content.at_eof()):
                raise aiohttp.ClientPayloadError("The body is not as long as was said.")
            into[place:stop] = chunk
            place = stop


async def _all(work: Iterable[Coroutine[object, None, T]]) -> list[T]:
    """Every result in order; the first failure cancels the rest and is raised once they have ended."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _aborted(client: _Client, where: dict[str, str]) -> None:
    try:
        await client.abort_multipart_upload(**where)
    except (BotoCoreError, ClientError, aiohttp.ClientError, OSError):
        return  # a sweep of unfinished uploads, or the bucket's lifecycle rule, takes it later


def _entry(found: dict[str, Untyped]) -> Entry:
    written = found.get("LastModified")
    return Entry(found["Key"], found["Size"], written.timestamp() if written else None)


def _age(upload: dict[str, datetime], now: datetime) -> timedelta:
    return now - upload["Initiated"]


def _client_answer(error: ClientError) -> Answer:
    metadata = error.response.get("ResponseMetadata", {})
    code = str(error.response.get("Error", {}).get("Code", ""))
    wait = str(metadata.get("HTTPHeaders", {}).get("retry-after", ""))
    return Answer(
        metadata.get("HTTPStatusCode"), code if code.isalpha() else "", float(wait) if wait.isdecimal() else 0.0
    )
