"""Real S3 servers for the tests and benchmarks, on free ports, gone when their context ends.

SeaweedFS is a process of its own that checks signatures and checksums; moto is a thread here, quick to
start, and checks neither.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
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


@contextlib.contextmanager
def seaweedfs() -> Iterator[S3Server]:
    """SeaweedFS with all its parts in one process and its data in memory, where there is a file system for that."""
    directory = tempfile.mkdtemp(prefix="seaweedfs-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
    ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
    weed = Path(sys.executable).with_name("weed")
    command = [str(weed), "server", f"-dir={directory}", *FLAGS, *(f"-{name}={port}" for name, port in ports.items())]
    log = Path(directory) / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    try:
        endpoint_url = f"http://127.0.0.1:{ports['s3.port']}"
        _wait_for_bucket(endpoint_url, process, log)
        yield S3Server(endpoint_url)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


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
            s3.create_bucket(Bucket=BUCKET)
            s3.put_object(Bucket=BUCKET, Key="started", Body=b"")
            return
        except (BotoCoreError, ClientError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not start:\n{log.read_text(errors='replace')[-4000:]}") from None
            time.sleep(0.1)
