"""Uploads that a crash left: found by both clients, judged by the store's clock, and only those below the prefix."""

import asyncio

import pytest

from gradientmail_core.mailbox.objectstore.location import Backend
from gradientmail_core.mailbox.objectstore.signed import Refused
from gradientmail_core.mailbox.objectstore.uploads import PARTS_MOST, Upload, parsed_parts, parsed_uploads, part_bytes
from gradientmail_core.mailbox.surroundings import Abandoned
from tests.core.mailbox.servers import S3Server, client

DATE = "Mon, 30 Nov 2026 12:00:00 GMT"


@pytest.mark.parametrize("backend", ["s3fs", "obstore"])
def test_uploads_that_a_crash_left_are_removed(seaweedfs_server: S3Server, backend: Backend) -> None:
    s3, bucket, prefix = client(seaweedfs_server.endpoint_url), seaweedfs_server.bucket, f"crashed-{backend}"
    keys = (f"{prefix}/a", f"{prefix}/b c", f"other-{backend}/c")
    ids = {key: s3.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"] for key in keys}
    s3.upload_part(Bucket=bucket, Key=keys[0], UploadId=ids[keys[0]], PartNumber=1, Body=b"x" * 1000)

    async def work() -> None:
        mailbox = seaweedfs_server.mailbox(prefix, backend)
        assert await mailbox.abandoned(3600, remove=True) == Abandoned(0, 0)
        for remove in (False, True):
            assert await mailbox.abandoned(-60, remove=remove) == Abandoned(2, 1000)
        assert await mailbox.abandoned(-60, remove=True) == Abandoned(0, 0)
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


@pytest.mark.parametrize("document", [b"", b"<R><Part><Size>many</Size></Part></R>"])
def test_what_is_no_list_of_parts_is_refused(document: bytes) -> None:
    assert parsed_parts(b"<R><Part><Size>5</Size></Part><Part><Size>7</Size></Part></R>") == 12
    with pytest.raises(Refused):
        parsed_parts(document)


@pytest.mark.parametrize("size", [0, 1, 8 << 20, 12 << 30, 80 << 30, 81 << 30, 5 << 40])
def test_a_body_of_any_size_a_store_takes_has_few_enough_parts(size: int) -> None:
    """12 GB is past what one PUT may hold, 80 GB past ten thousand parts of the usual size."""
    part = part_bytes(size, 8 << 20)
    assert 8 << 20 <= part <= 5 << 30 and -(-size // part) <= PARTS_MOST
    assert part == 8 << 20 or size > PARTS_MOST * (8 << 20)
