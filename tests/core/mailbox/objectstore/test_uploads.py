"""Uploads that a crash left: found by both clients, judged by the store's clock, and only those below the prefix."""

import asyncio

import pytest

from gradientmail_core.mailbox.objectstore.location import Backend
from gradientmail_core.mailbox.objectstore.signed import Refused
from gradientmail_core.mailbox.objectstore.uploads import Upload, parsed_uploads
from tests.core.mailbox.servers import S3Server, client

DATE = "Mon, 30 Nov 2026 12:00:00 GMT"


@pytest.mark.parametrize("backend", ["s3fs", "obstore"])
def test_uploads_that_a_crash_left_are_removed(seaweedfs_server: S3Server, backend: Backend) -> None:
    s3, bucket, prefix = client(seaweedfs_server.endpoint_url), seaweedfs_server.bucket, f"crashed-{backend}"
    for key in (f"{prefix}/a", f"{prefix}/b c", f"other-{backend}/c"):
        s3.create_multipart_upload(Bucket=bucket, Key=key)

    async def work() -> None:
        mailbox = seaweedfs_server.mailbox(prefix, backend)
        assert await mailbox.remove_abandoned(3600) == 0
        assert await mailbox.remove_abandoned(-60) == 2
        await mailbox.close()

    asyncio.run(work())
    left = [upload["Key"] for upload in s3.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]
    assert f"other-{backend}/c" in left and not any(key.startswith(prefix) for key in left)


def test_ages_are_by_the_stores_clock() -> None:
    document = (
        b'<R xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Upload><Key>run/a</Key><UploadId>1</UploadId>'
        b"<Initiated>2026-11-30T11:59:00.000Z</Initiated></Upload></R>"
    )
    assert parsed_uploads(document, DATE) == (Upload("run/a", "1", 60.0),)
    assert parsed_uploads(b"<R/>", DATE) == ()


@pytest.mark.parametrize(
    ("document", "date"),
    [(b"", DATE), (b"<R/>", ""), (b"<R><Upload><Initiated>yesterday</Initiated></Upload></R>", DATE)],
)
def test_what_is_no_such_listing_is_refused(document: bytes, date: str) -> None:
    with pytest.raises(Refused):
        parsed_uploads(document, date)
