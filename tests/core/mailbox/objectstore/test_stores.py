"""Both S3 backends over HTTP: the same conclusions from the same answers, and no secret in any of them."""

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gradientmail_core.clock import SystemClock
from gradientmail_core.errors import (
    ConfigurationError,
    MailboxDenied,
    MailboxError,
    MailboxUnavailable,
    MailboxUnsupported,
)
from gradientmail_core.mailbox import (
    CreateOutcome,
    DirectoryMailbox,
    Faults,
    FaultyMailbox,
    Mailbox,
    MemoryMailbox,
    MeteredMailbox,
    RetryingMailbox,
    RetryPolicy,
    ThrottledMailbox,
    open_mailbox,
    probe_store,
)
from gradientmail_core.mailbox.objectstore import Credentials, S3Mailbox
from gradientmail_core.mailbox.objectstore.location import Backend
from tests.core.mailbox.objectstore.scripted import (
    CANARIES,
    Reply,
    Request,
    Script,
    given_credentials,
    in_turn,
    listing_document,
    scripted,
)

BACKENDS: tuple[Backend, ...] = ("s3fs", "obstore")
both = pytest.mark.parametrize("backend", BACKENDS)
QUICK = RetryPolicy(deadline=2.0, first_wait=0.01, longest_wait=0.02, per_second=1000.0)


def asked(
    backend: Backend, script: Script, work: Callable[[S3Mailbox], Coroutine[Any, Any, object]]
) -> tuple[object, list[Request]]:
    """What ``work`` returned against a scripted endpoint, and the requests it made."""

    async def main() -> object:
        mailbox = endpoint.mailbox(backend)
        try:
            return await work(mailbox)
        finally:
            await mailbox.close()

    with scripted(script) as endpoint:
        return asyncio.run(main()), endpoint.requests


@both
@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([Reply(200)], CreateOutcome.CREATED),
        ([Reply(409, "ConditionalRequestConflict")] * 3 + [Reply(200)], CreateOutcome.CREATED),
        ([Reply(409, "ConditionalRequestConflict"), Reply(412, "PreconditionFailed")], CreateOutcome.TAKEN),
        ([Reply(412, "PreconditionFailed")], CreateOutcome.TAKEN),
        ([Reply(412)], CreateOutcome.TAKEN),
        ([Reply(304)], CreateOutcome.TAKEN),
        ([Reply(404, "NoSuchBucket")], MailboxDenied),
        ([Reply(404)], MailboxDenied),
        ([Reply(501, "NotImplemented")], MailboxUnsupported),
        ([Reply(503, "SlowDown"), Reply(500), Reply(200)], CreateOutcome.CREATED),
        ([Reply(silence=5.0), Reply(412)], CreateOutcome.TAKEN),
        ([Reply(403, "AccessDenied")], MailboxDenied),
    ],
    ids=lambda value: "-".join(str(reply.status) for reply in value) if isinstance(value, list) else "",
)
def test_precondition_table(
    backend: Backend, replies: list[Reply], expected: CreateOutcome | type[MailboxError]
) -> None:
    async def work(mailbox: S3Mailbox) -> object:
        return await RetryingMailbox(mailbox, SystemClock(), random.Random(0), policy=QUICK).create("a", b"x")

    if isinstance(expected, CreateOutcome):
        outcome, requests = asked(backend, in_turn(*replies), work)
        assert outcome is expected
    else:
        with pytest.raises(expected):
            asked(backend, in_turn(*replies), work)
        return
    assert len(requests) == len(replies), "the library must not repeat a create by itself"
    assert {request.headers["if-none-match"] for request in requests} == {"*"}
    assert {request.body for request in requests} == {b"x"}


@both
def test_each_verb_is_one_request_as_documented(backend: Backend) -> None:
    async def work(mailbox: S3Mailbox) -> None:
        await mailbox.put("p", b"123")
        await mailbox.create("c", b"45")
        assert await mailbox.get("g", limit=1000) == b"body"
        await mailbox.delete("d")
        assert [entry.key async for entry in mailbox.list("live/")] == ["live/a"]

    def script(request: Request) -> Reply:
        document = listing_document(["run/live/a"])
        return Reply(body=document if "list-type" in request.query else b"body" if request.method == "GET" else b"")

    _, requests = asked(backend, script, work)
    seen = [(request.method, request.path) for request in requests]
    assert seen == [
        ("PUT", "/bucket/run/p"),
        ("PUT", "/bucket/run/c"),
        ("GET", "/bucket/run/g"),
        ("DELETE", "/bucket/run/d"),
        ("GET", "/bucket"),
    ]
    assert ["if-none-match" in request.headers for request in requests] == [False, True, False, False, False]
    assert not any("expect" in request.headers for request in requests)
    assert not any(name.startswith("x-amz-checksum") for request in requests for name in request.headers)
    assert requests[0].body == b"123"


@both
@pytest.mark.parametrize("limit", [None, 4, 1 << 40])
def test_a_server_without_ranges_is_read_whole(backend: Backend, limit: int | None) -> None:
    async def work(mailbox: S3Mailbox) -> None:
        assert await mailbox.get("a", limit=limit) == b"body"

    asked(backend, in_turn(Reply(body=b"body")), work)


@both
def test_pages_are_followed_to_the_end(backend: Backend) -> None:
    def script(request: Request) -> Reply:
        token = request.query.get("continuation-token", "0")
        following = str(int(token) + 1) if token != "3" else ""
        return Reply(body=listing_document([f"run/k/{token}"], following))

    async def work(mailbox: S3Mailbox) -> object:
        return [entry.key async for entry in mailbox.list("k/", after="k/")]

    found, requests = asked(backend, script, work)
    assert found == ["k/0", "k/1", "k/2", "k/3"]
    assert requests[0].query["start-after"] == "run/k/"


@both
def test_a_body_that_ends_early_is_not_handed_out(backend: Backend) -> None:
    async def work(mailbox: S3Mailbox) -> None:
        with pytest.raises(MailboxUnavailable):
            await mailbox.get("a")
        with pytest.raises(MailboxUnavailable):
            await mailbox.get("a", limit=1000)

    asked(backend, in_turn(Reply(body=b"x" * 1000, cut=10)), work)


@both
def test_a_dead_endpoint_is_a_passing_fault(backend: Backend) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"

    async def work() -> None:
        mailbox = S3Mailbox("b", endpoint_url=url, backend=backend, credential_provider=given_credentials)
        for call in (mailbox.get("a"), mailbox.put("a", b""), mailbox.create("a", b""), mailbox.delete("a")):
            with pytest.raises(MailboxUnavailable):
                await call
        with pytest.raises(MailboxUnavailable):
            _ = [entry async for entry in mailbox.list("")]
        await mailbox.close()

    asyncio.run(work())


@both
def test_expired_keys_are_renewed_once_for_all(backend: Backend) -> None:
    keys = ["OLDKEY"]
    asked_for = []

    def provide() -> Credentials:
        asked_for.append(keys[0])
        return Credentials(keys[0], "secret")

    def script(request: Request) -> Reply:
        if "NEWKEY" in request.headers["authorization"]:
            return Reply(body=b"body")
        keys[0] = "NEWKEY"
        return Reply(400, "ExpiredToken", silence=0.05)

    async def work() -> None:
        mailbox = endpoint.mailbox(backend, provide)
        assert await asyncio.gather(*(mailbox.get(f"k/{n}") for n in range(8))) == [b"body"] * 8
        await mailbox.close()

    with scripted(script) as endpoint:
        asyncio.run(work())
    assert asked_for == ["OLDKEY", "NEWKEY"]


@both
def test_keys_about_to_expire_are_replaced_without_a_refusal(backend: Backend) -> None:
    made = iter(range(1000))

    def provide() -> Credentials:
        return Credentials(f"KEY{next(made)}", "secret", None, datetime.now(UTC) + timedelta(seconds=60))

    async def work() -> None:
        mailbox = endpoint.mailbox(backend, provide)
        for _ in range(3):
            await mailbox.get("a")
        await mailbox.close()

    with scripted(in_turn(Reply(body=b"x"))) as endpoint:
        asyncio.run(work())
    used = [request.headers["authorization"].split("Credential=")[1].split("/")[0] for request in endpoint.requests]
    assert len(set(used)) == 3, used


@both
def test_a_store_that_ignores_the_condition_is_found_out(backend: Backend) -> None:
    kept: dict[str, bytes] = {}

    def script(request: Request) -> Reply:
        if request.method == "PUT":
            kept[request.path] = request.body
        found = kept.get(request.path)
        return Reply(404, "NoSuchKey") if found is None else Reply(body=found if request.method == "GET" else b"")

    async def work(mailbox: S3Mailbox) -> None:
        assert (await probe_store(mailbox)).store == "none"

    asked(backend, script, work)


@both
@pytest.mark.parametrize("status", [301, 403, 409, 500])
def test_credentials_appear_in_no_error_log_or_repr(
    backend: Backend, status: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    shown: list[str] = []

    async def work(mailbox: S3Mailbox) -> None:
        calls = [
            mailbox.get("a"),
            mailbox.put("a", b""),
            mailbox.create("a", b""),
            mailbox.delete("a"),
            listed(mailbox),
        ]
        for call in calls:
            try:
                await call
            except MailboxError as error:
                shown.extend([repr(error), str(error), repr(error.__cause__), repr(error.__context__)])
        clock, seeded = SystemClock(), random.Random(0)
        shown.extend(map(repr, (MeteredMailbox(mailbox), ThrottledMailbox(mailbox, clock))))
        shown.extend(
            map(repr, (RetryingMailbox(mailbox, clock, seeded), FaultyMailbox(mailbox, clock, seeded, Faults())))
        )
        shown.append(mailbox.url)

    asked(backend, in_turn(Reply(status, "SignatureDoesNotMatch")), work)
    printed = capfd.readouterr()
    everything = "\n".join([*shown, caplog.text, printed.out, printed.err])
    assert len(shown) >= 5
    assert [canary for canary in CANARIES if canary in everything] == []


async def listed(mailbox: Mailbox) -> list[str]:
    return [entry.key async for entry in mailbox.list("")]


@both
def test_a_missing_bucket_names_the_remedy(backend: Backend) -> None:
    async def work(mailbox: S3Mailbox) -> None:
        for call in (mailbox.get("a"), mailbox.put("a", b""), listed(mailbox)):
            with pytest.raises(MailboxDenied, match="bucket"):
                await call

    asked(backend, in_turn(Reply(404, "NoSuchBucket")), work)


def test_obstore_is_preferred_and_s3fs_can_be_asked_for() -> None:
    assert "Obstore" in repr(vars(S3Mailbox("bucket", credential_provider=given_credentials)))
    assert "S3fs" in repr(vars(S3Mailbox("bucket", backend="s3fs", credential_provider=given_credentials)))


@pytest.mark.parametrize("url", ["gs://bucket/run", "az://container/run?account=me", "memory-of-fsspec://x"])
def test_other_schemes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    if url.startswith("memory"):
        with pytest.raises(ConfigurationError):
            open_mailbox(url)
    else:
        mailbox = open_mailbox(url)
        assert mailbox.url == url.partition("?")[0]
        assert not isinstance(mailbox, MemoryMailbox | DirectoryMailbox)
