"""Real object stores for the tests and benchmarks, on free ports, gone when their context ends.

SeaweedFS is a process of its own that checks signatures and checksums; moto is a thread here, quick to
start, and checks neither. Azurite, Azure's emulator, comes from npm: `make` puts it into .venv where there is one.
"""

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradientmail_core.mailbox.objectstore import Credentials, S3Mailbox
from gradientmail_core.mailbox.objectstore.location import Backend

ACCESS_KEY, SECRET_KEY = "AKIDCONTRACTTEST", "secret-of-the-contract-test"
BUCKET = "mailbox"
START_SECONDS = 60.0
MEMORY = "/dev/shm"
PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)
FLAGS = (
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-filer",
    "-s3",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-master.telemetry=false",
    "-master.electionTimeout=1s",
    "-volume.max=0",
)


@dataclass(frozen=True)
class S3Server:
    """A server with one bucket."""

    endpoint_url: str
    bucket: str = BUCKET

    def mailbox(self, prefix: str, backend: Backend) -> S3Mailbox:
        """A new mailbox below ``prefix``, with the server's keys."""
        return S3Mailbox(
            self.bucket, prefix, endpoint_url=self.endpoint_url, backend=backend, credential_provider=given_credentials
        )

    def url(self, prefix: str, backend: Backend) -> str:
        """The same as a URL, for a process that has :func:`environment`."""
        return f"s3://{self.bucket}/{prefix}?endpoint_url={self.endpoint_url}&backend={backend}"


def given_credentials() -> Credentials:
    """The only keys the servers accept."""
    return Credentials(ACCESS_KEY, SECRET_KEY)


def environment() -> dict[str, str]:
    """This process's environment with the servers' keys."""
    return {**os.environ, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}


def client(endpoint_url: str) -> Any:
    """A plain client, to set up and to look behind the mailbox's back."""
    import botocore.session
    from botocore.config import Config

    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5),
    )


class RestartableServer:
    """SeaweedFS with all its parts in one process, on ports and a directory that it keeps when it is started again."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="seaweedfs-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self._ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self.server = S3Server(f"http://127.0.0.1:{self._ports['s3.port']}")

    def start(self) -> None:
        """Start it and wait until it takes an object."""
        weed, log = Path(sys.executable).with_name("weed"), Path(self.directory) / "log"
        ports = (f"-{name}={port}" for name, port in self._ports.items())
        command = [str(weed), "server", f"-dir={self.directory}", *FLAGS, *ports]
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        _wait_for_bucket(self.server.endpoint_url, self._process, log)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def restartable_seaweedfs() -> Iterator[RestartableServer]:
    """A running SeaweedFS of its own, with its data in memory, where there is a file system for that."""
    server = RestartableServer()
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(server.directory, ignore_errors=True)


@contextlib.contextmanager
def seaweedfs() -> Iterator[S3Server]:
    """SeaweedFS that stays up."""
    with restartable_seaweedfs() as restartable:
        yield restartable.server


@contextlib.contextmanager
def moto() -> Iterator[S3Server]:
    """moto's server on a thread."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        client(f"http://{host}:{port}").create_bucket(Bucket=BUCKET)
        yield S3Server(f"http://{host}:{port}")
    finally:
        server.stop()


@dataclass(frozen=True)
class AzureServer:
    """A server with one container. The key is the published one of every emulator."""

    port: int
    account: str = "devstoreaccount1"
    key: str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def url(self, prefix: str, backend: str = "obstore") -> str:
        """A mailbox there, for a process whose AZURE_STORAGE_ACCOUNT_KEY is ``key``."""
        endpoint = f"http://127.0.0.1:{self.port}/{self.account}"
        return f"az://{BUCKET}/{prefix}?account={self.account}&endpoint_url={endpoint}&backend={backend}"

    def make_container(self) -> bool:
        """Create the container; False while nobody answers."""
        date, version = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "2021-08-06"
        what = f"/{self.account}/{self.account}/{BUCKET}\nrestype:container"
        text = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{what}"
        digest = hmac.new(base64.b64decode(self.key), text.encode(), hashlib.sha256).digest()
        signature = f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"
        headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": signature, "Content-Length": "0"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("PUT", f"/{self.account}/{BUCKET}?restype=container", headers=headers)
            return connection.getresponse().status == 201
        except OSError:
            return False
        finally:
            connection.close()


def azurite_program() -> str | None:
    """Azure's emulator: what AZURITE_BLOB names, or the one in this environment, or on the path."""
    own = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    return os.environ.get("AZURITE_BLOB") or (str(own) if own.exists() else shutil.which("azurite-blob"))


@contextlib.contextmanager
def azurite() -> Iterator[AzureServer]:
    """Azurite's blob service with its data in memory."""
    program, port = azurite_program(), _free_ports(1)[0]
    assert program is not None
    flags = ("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent")
    command = [program, *flags, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    process, server = subprocess.Popen(command, stdout=subprocess.DEVNULL), AzureServer(port)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not server.make_container():
            assert process.poll() is None and time.monotonic() < deadline, "Azurite did not start"
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_for_bucket(endpoint_url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    s3, deadline = client(endpoint_url), time.monotonic() + START_SECONDS
    while True:
        try:
            with contextlib.suppress(s3.exceptions.BucketAlreadyExists, s3.exceptions.BucketAlreadyOwnedByYou):
                s3.create_bucket(Bucket=BUCKET)
            s3.put_object(Bucket=BUCKET, Key="started", Body=b"x" * 1000)  # an empty body needs no volume
            return
        except (BotoCoreError, ClientError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not start:\n{log.read_text(errors='replace')[-4000:]}") from None
            time.sleep(0.1)
