"""Settings of every test: no property test is judged by how fast this machine is today.

Object stores: one server of each kind for the whole session, started when a test first asks.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.core.mailbox.servers import AzureServer, S3Server, azurite, azurite_program, moto, seaweedfs

# Tests run side by side, and their models are tiny: threads that wait for each other cost more than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# A shell that starts a job in the background lets it ignore Ctrl-C, and tests send it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[S3Server]:
    with seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    with moto() as server:
        yield server


@pytest.fixture(scope="session")
def azure_server() -> Iterator[AzureServer]:
    if azurite_program() is None:
        pytest.skip("Azurite is not installed: install Node.js with npm and run make again, or set AZURITE_BLOB")
    with azurite() as server:
        yield server


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """A trainer that a test interrupts may leave its handlers behind, and the next test is not to meet them."""
    held = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in held.items():
        signal.signal(number, handler)
