"""What is particular to s3fs: parts, ranges, and uploads that a crash left unfinished."""

import asyncio
import contextlib
import random

import pytest

from gradientmail_core.errors import MailboxUnavailable, PayloadTooLarge
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.mailbox.objectstore import s3fs, uploads
from tests.core.mailbox.objectstore.scripted import Reply, Request, in_turn, scripted
from tests.core.mailbox.servers import S3Server, client

MIB = 1 << 20


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts of the least size that S3 allows, so that a few MiB are several."""
    for name, size in (("PART", 5), ("RANGE", 5), ("IN_RANGES_FROM", 10)):
        monkeypatch.setattr(s3fs, name, size * MIB)
    return 5 * MIB


@pytest.mark.parametrize("size", [10 * MIB, 10 * MIB + 1, 17 * MIB + 13])
def test_parts_and_ranges_make_the_same_body(moto_server: S3Server, small_parts: int, size: int) -> None:
    body = random.Random(size).randbytes(size)

    async def work() -> None:
        mailbox = moto_server.mailbox("parts", "s3fs")
        await mailbox.put("large", body)
        assert await mailbox.get("large", limit=1 << 30) == body
        assert await mailbox.get("large") == body
        with pytest.raises(PayloadTooLarge):
            await mailbox.get("large", limit=size - 1)
        await mailbox.close()

    asyncio.run(work())
    etag = client(moto_server.endpoint_url).head_object(Bucket=moto_server.bucket, Key="parts/large")["ETag"]
    assert ("-" in etag) == (size > 2 * small_parts)


def test_large_bodies_have_larger_parts(
    moto_server: S3Server, small_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PARTS_MOST", 2)
    body = random.Random(1).randbytes(3 * small_parts)

    async def work() -> None:
        mailbox = moto_server.mailbox("larger", "s3fs")
        await mailbox.put("large", body)
        assert await mailbox.get("large") == body
        await mailbox.close()

    asyncio.run(work())
    etag = client(moto_server.endpoint_url).head_object(Bucket=moto_server.bucket, Key="larger/large")["ETag"]
    assert etag.strip('"').endswith("-2")


def test_a_server_without_ranges_is_not_believed(small_parts: int) -> None:
    """It would send the whole body for each range."""

    async def work() -> None:
        mailbox = endpoint.mailbox("s3fs")
        with pytest.raises(PayloadTooLarge):
            await mailbox.get("a")
        await mailbox.close()

    with scripted(in_turn(Reply(body=bytes(3 * small_parts)))) as endpoint:
        asyncio.run(work())


def test_a_create_is_one_request_at_any_size(small_parts: int) -> None:
    async def work() -> None:
        mailbox = endpoint.mailbox("s3fs")
        await mailbox.create("a", bytes(3 * small_parts))
        await mailbox.close()

    with scripted(in_turn(Reply())) as endpoint:
        asyncio.run(work())
    assert [(request.method, request.query) for request in endpoint.requests] == [("PUT", {})]
    assert endpoint.requests[0].headers["if-none-match"] == "*"


def uploading(request: Request) -> Reply:
    """An endpoint on which the second part always fails."""
    if request.method == "POST":
        return Reply(body=b"<R><UploadId>upload-1</UploadId></R>")
    return Reply(503, "SlowDown") if request.query.get("partNumber") == "2" else Reply()


def test_a_failed_upload_is_aborted(small_parts: int) -> None:
    async def work() -> None:
        mailbox = endpoint.mailbox("s3fs")
        with pytest.raises(MailboxUnavailable):
            await mailbox.put("a", bytes(3 * small_parts))
        await mailbox.close()

    with scripted(uploading) as endpoint:
        asyncio.run(work())
    aborted = [request for request in endpoint.requests if request.method == "DELETE"]
    assert [request.query for request in aborted] == [{"uploadId": "upload-1"}]


def test_a_cancelled_upload_is_aborted(small_parts: int) -> None:
    async def work() -> None:
        mailbox = endpoint.mailbox("s3fs")
        upload = asyncio.ensure_future(mailbox.put("a", bytes(3 * small_parts)))
        while not any(request.query.get("partNumber") for request in endpoint.requests):
            await asyncio.sleep(0.01)
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        await mailbox.close()

    def slow(request: Request) -> Reply:
        reply = uploading(request)
        return Reply(body=reply.body, silence=0.3) if request.query.get("partNumber") else reply

    with scripted(slow) as endpoint:
        asyncio.run(work())
    assert [request.query for request in endpoint.requests if request.method == "DELETE"] == [{"uploadId": "upload-1"}]


async def put_once_ready(mailbox: Mailbox, body: bytes) -> None:
    """Store an object; on a busy machine the server has no volume for it at first and answers 500."""
    for _ in range(20):
        with contextlib.suppress(MailboxUnavailable):
            return await mailbox.put("warm", body)
        await asyncio.sleep(0.5)
    raise AssertionError("the server never took the object")


def test_a_request_cut_off_early_leaves_no_empty_object(seaweedfs_server: S3Server) -> None:
    """The body is not held back until the server asks for it: SeaweedFS would store nothing as something."""
    body = bytes(2 * MIB)

    async def work() -> None:
        mailbox = seaweedfs_server.mailbox("cut", "s3fs")
        await put_once_ready(mailbox, body)
        for turn in range(30):
            call = asyncio.ensure_future(mailbox.put(f"k/{turn}", body))
            await asyncio.sleep(turn / 2000)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.2)
        sizes = {entry.size async for entry in mailbox.list("k/")}
        assert sizes <= {len(body)}
        await mailbox.close()

    asyncio.run(work())
