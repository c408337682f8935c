"""Every mailbox and every wrapper through the whole contract."""

import asyncio
import errno
import os
import random
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from gradientmail_core.clock import SystemClock
from gradientmail_core.mailbox import (
    DirectoryMailbox,
    Faults,
    FaultyMailbox,
    Mailbox,
    MemoryMailbox,
    MeteredMailbox,
    RetryingMailbox,
    ThrottledMailbox,
    open_mailbox,
)
from gradientmail_core.mailbox.objectstore.location import Backend
from tests.core.mailbox import contract
from tests.core.mailbox.contract import Open, Scenario
from tests.core.mailbox.servers import AzureServer, S3Server

Wrap = Callable[[Mailbox], Mailbox]


def directory(request: pytest.FixtureRequest) -> Open:
    path = request.getfixturevalue("tmp_path") / "mailbox"
    return lambda: DirectoryMailbox(path)


def directory_without_hard_links(request: pytest.FixtureRequest) -> Open:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    request.getfixturevalue("monkeypatch").setattr(os, "link", refuse)
    return directory(request)


def memory(request: pytest.FixtureRequest) -> Open:
    mailbox = MemoryMailbox()
    return lambda: mailbox


def wrapped(wrap: Wrap) -> Callable[[pytest.FixtureRequest], Open]:
    def over_memory(request: pytest.FixtureRequest) -> Open:
        shared = memory(request)
        return lambda: wrap(shared())

    return over_memory


def over_s3(server: str, backend: Backend) -> Callable[[pytest.FixtureRequest], Open]:
    def open_s3(request: pytest.FixtureRequest) -> Open:
        running: S3Server = request.getfixturevalue(f"{server}_server")
        prefix = f"contract-{secrets.token_hex(4)}"
        return lambda: running.mailbox(prefix, backend)

    return open_s3


def over_azure(backend: str) -> Callable[[pytest.FixtureRequest], Open]:
    def open_azure(request: pytest.FixtureRequest) -> Open:
        server: AzureServer = request.getfixturevalue("azure_server")
        request.getfixturevalue("monkeypatch").setenv("AZURE_STORAGE_ACCOUNT_KEY", server.key)
        url = server.url(f"contract-{secrets.token_hex(4)}", backend)
        return lambda: open_mailbox(url)

    return open_azure


MAILBOXES: dict[str, Callable[[pytest.FixtureRequest], Open]] = {
    "memory": memory,
    "directory": directory,
    "directory-without-hard-links": directory_without_hard_links,
    "metered": wrapped(MeteredMailbox),
    "throttled": wrapped(lambda inner: ThrottledMailbox(inner, SystemClock(), up=1e12, down=1e12)),
    "faultless": wrapped(lambda inner: FaultyMailbox(inner, SystemClock(), random.Random(0), Faults())),
    "retrying": wrapped(lambda inner: RetryingMailbox(inner, SystemClock(), random.Random(0))),
    "s3fs-seaweedfs": over_s3("seaweedfs", "s3fs"),
    "s3fs-moto": over_s3("moto", "s3fs"),
    "obstore-seaweedfs": over_s3("seaweedfs", "obstore"),
    "obstore-moto": over_s3("moto", "obstore"),
    "obstore-azurite": over_azure("obstore"),
    "adlfs-azurite": over_azure("fsspec"),
}


@pytest.fixture(params=MAILBOXES)
def open_fresh(request: pytest.FixtureRequest) -> Open:
    return MAILBOXES[request.param](request)


@pytest.mark.parametrize("scenario", contract.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_contract(scenario: Scenario, open_fresh: Open) -> None:
    asyncio.run(scenario(open_fresh))


def test_a_closed_directory_says_so(tmp_path: Path) -> None:
    asyncio.run(contract.a_closed_mailbox_says_so(lambda: DirectoryMailbox(tmp_path)))


@pytest.mark.parametrize("backend", ["s3fs", "obstore"])
def test_a_closed_object_store_says_so(moto_server: S3Server, backend: Backend) -> None:
    asyncio.run(contract.a_closed_mailbox_says_so(lambda: moto_server.mailbox("closed", backend)))
