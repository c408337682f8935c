"""What is particular to obstore: strangers' keys, its errors in words, and other clouds."""

import asyncio
from typing import Any

import obstore as library
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import MemoryStore

from gradientmail_core.errors import MailboxDenied, MailboxUnsupported
from gradientmail_core.mailbox import CreateOutcome
from gradientmail_core.mailbox.objectstore.answers import Answer
from gradientmail_core.mailbox.objectstore.objects import ObjectMailbox
from gradientmail_core.mailbox.objectstore.obstore import ObstoreTransport, azure_store, google_store
from tests.core.mailbox.objectstore.scripted import Reply, in_turn, scripted
from tests.core.mailbox.servers import S3Server, client

STRANGERS = ("strange/a//b", "strange/leases/", "strange/ä", "strange/a b", "strange/.hidden", "strange/\x01")


@pytest.mark.parametrize("backend", ["obstore", "s3fs"])
def test_strangers_keys_do_not_blind_a_listing(moto_server: S3Server, backend: Any) -> None:
    s3 = client(moto_server.endpoint_url)
    for key in (*STRANGERS, "strange/ok"):
        s3.put_object(Bucket=moto_server.bucket, Key=key, Body=b"1")

    async def work() -> None:
        mailbox = moto_server.mailbox("strange", backend)
        assert [entry.key async for entry in mailbox.list("")] == ["ok"]
        await mailbox.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (AlreadyExistsError("x: status code: 412 Precondition Failed: <Error><Code>Pre</Code>"), Answer(412, "Pre")),
        (AlreadyExistsError("x: status code: 409 Conflict: <Code>Odd</Code>"), Answer(409, "Odd")),
        (FileNotFoundError("Object at location x not found: No data in memory found."), Answer(404)),
        (GenericError("status code: 503 Slow Down"), Answer(503)),
        (GenericError("status code: 400 <Code>not a code!</Code>"), Answer(400)),
        (GenericError("Received redirect without LOCATION"), Answer(301, "PermanentRedirect")),
        (GenericError("error sending request for url (http://169.254.169.254/latest)"), Answer(401, "NoCredentials")),
        (GenericError("error sending request"), Answer(None)),
        (OSError("broken pipe"), Answer(None)),
        (ValueError("a bug"), None),
    ],
)
def test_errors_in_words(error: Exception, answer: Answer | None) -> None:
    assert ObstoreTransport(MemoryStore()).answer(error) == answer


def test_an_instance_role_that_once_answered_may_fail_in_passing() -> None:
    async def work() -> None:
        transport = ObstoreTransport(MemoryStore())
        await transport.put("a", b"")
        assert transport.answer(GenericError("http://169.254.169.254")) == Answer(None)

    asyncio.run(work())


def test_other_clouds_list_through_the_library() -> None:
    async def work() -> None:
        store = MemoryStore()
        mailbox = ObjectMailbox(ObstoreTransport(store), "gs://bucket/run", "run", max_concurrency=4)
        for key in ("live/a", "live/b", "lively"):
            assert await mailbox.create(key, b"x") is CreateOutcome.CREATED
        await library.put_async(store, "elsewhere", b"")
        assert [entry.key async for entry in mailbox.list("live", after="live/a")] == ["live/b", "lively"]
        assert await mailbox.create("live/a", b"y") is CreateOutcome.TAKEN
        with pytest.raises(MailboxUnsupported, match="lifecycle"):
            await mailbox.abandoned(0, remove=True)

    asyncio.run(work())


def test_a_stranger_that_blinds_another_cloud_is_named() -> None:
    properties = (
        "<Properties><Last-Modified>Mon, 01 Jan 2024 00:00:00 GMT</Last-Modified>"
        "<Content-Length>1</Content-Length><Content-Type>t</Content-Type></Properties>"
    )
    blob = f"<Blob><Name>run//x</Name>{properties}</Blob>"
    page = f"<EnumerationResults><Blobs>{blob}</Blobs></EnumerationResults>".encode()

    async def work() -> None:
        store = azure_store("container", "me", endpoint.url, skip_signature=True)
        mailbox = ObjectMailbox(ObstoreTransport(store), "az://container/run", "run", max_concurrency=4)
        with pytest.raises(MailboxDenied, match="Remove the objects"):
            _ = [entry async for entry in mailbox.list("")]

    with scripted(in_turn(Reply(body=page, headers={"content-type": "application/xml"}))) as endpoint:
        asyncio.run(work())


def test_clouds_are_named_in_their_own_terms() -> None:
    assert "bucket" in repr(google_store("bucket"))
    assert "container" in repr(azure_store("container", "account"))
