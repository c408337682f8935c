"""File systems of fsspec: everything but an exclusive create, which only some may do."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gradientmail_core.errors import ConfigurationError, MailboxUnsupported, PayloadTooLarge
from gradientmail_core.mailbox import CreateOutcome, Entry, open_mailbox, probe_store
from gradientmail_core.mailbox.objectstore import fsspec
from gradientmail_core.mailbox.objectstore.answers import Answer
from gradientmail_core.mailbox.objectstore.objects import ObjectMailbox


def on_memory(scheme: str, work: Callable[[ObjectMailbox], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` on fsspec's memory file system, taken for one of ``scheme``."""
    bucket = secrets.token_hex(4)
    transport = fsspec.FsspecTransport(fsspec.open_file_system("memory"), scheme, bucket)
    asyncio.run(work(ObjectMailbox(transport, f"{scheme}://{bucket}/run", "run", max_concurrency=4)))


def test_reading_writing_listing_and_deleting() -> None:
    async def work(mailbox: ObjectMailbox) -> None:
        assert await mailbox.get("a") is None
        assert [entry async for entry in mailbox.list("")] == []
        await mailbox.put("live/a", b"123")
        await mailbox.put("live/b", bytearray(b"4"))
        await mailbox.put("lively", b"")
        assert await mailbox.get("live/a") == b"123"
        assert await mailbox.get("live/a", limit=3) == b"123"
        with pytest.raises(PayloadTooLarge):
            await mailbox.get("live/a", limit=2)
        assert {entry async for entry in mailbox.list("live/")} == {Entry("live/a", 3), Entry("live/b", 1)}
        await mailbox.delete("live/a")
        await mailbox.delete("live/a")
        assert await mailbox.get("live/a", limit=9) is None
        await mailbox.close()

    on_memory("memory", work)


def test_an_unknown_file_system_may_not_create() -> None:
    async def work(mailbox: ObjectMailbox) -> None:
        with pytest.raises(MailboxUnsupported, match="named syncer"):
            await mailbox.create("a", b"x")
        assert (await probe_store(mailbox)).store == "none"

    on_memory("memory", work)


def test_one_known_to_be_exclusive_may() -> None:
    async def work(mailbox: ObjectMailbox) -> None:
        assert await mailbox.create("a", b"x") is CreateOutcome.CREATED
        assert await mailbox.create("a", b"y") is CreateOutcome.TAKEN
        assert await mailbox.get("a") == b"x"
        assert (await probe_store(mailbox)).store == "atomic"

    on_memory("gs", work)


class HttpError(Exception):
    """As cloud libraries raise it."""

    def __init__(self, **attributes: int) -> None:
        super().__init__("secret words")
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (FileExistsError("x"), Answer(412)),
        (FileNotFoundError("x"), Answer(404)),
        (PermissionError("x"), Answer(403, "AccessDenied")),
        (NotImplementedError("x"), Answer(501)),
        (HttpError(code=429), Answer(429)),
        (HttpError(status=503), Answer(503)),
        (HttpError(status_code=409), Answer(409)),
        (TimeoutError(), Answer(None, "TimeoutError")),
        (ConnectionResetError(), Answer(None, "ConnectionResetError")),
        (ValueError("a bug"), None),
    ],
)
def test_errors_become_answers(error: Exception, answer: Answer | None) -> None:
    assert fsspec.FsspecTransport(fsspec.open_file_system("memory"), "gs", "b").answer(error) == answer


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nosuch"):
        fsspec.open_file_system("nosuch")


def test_settings_a_library_refuses_are_named_without_their_values() -> None:
    with pytest.raises(ConfigurationError) as caught:
        fsspec.open_file_system("az", connection_string="AccountKey=" + "c2VjcmV0")
    assert "settings" in caught.value.cause and "c2Vj" not in str(caught.value)


def test_what_adlfs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    assert fsspec.azure_settings({}) == {}
    assert fsspec.azure_settings({"account": "me"}) == {"account_name": "me"}
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=1")
    assert fsspec.azure_settings({}) == {"account_name": "mine"}
    given = fsspec.azure_settings({"endpoint_url": "http://host/mine"})
    assert given == {"connection_string": "BlobEndpoint=http://host/mine;AccountName=mine;SharedAccessSignature=sig=1"}


def test_a_backend_no_cloud_has_is_refused() -> None:
    for url in ("az://c/run?backend=s3fs", "gs://b/run?backend=nosuch", "gs://b/run?endpoint_url=http://x"):
        with pytest.raises(ConfigurationError):
            open_mailbox(url)
