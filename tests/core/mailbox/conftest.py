"""One SeaweedFS and one moto for the whole session, started when a test first asks."""

from collections.abc import Iterator

import pytest

from tests.core.mailbox.servers import S3Server, moto, seaweedfs


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[S3Server]:
    with seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    with moto() as server:
        yield server
