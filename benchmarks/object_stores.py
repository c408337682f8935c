"""Four bodies of 64 MiB up and down at once, through boto3's transfer manager, s3fs and obstore.

    python benchmarks/object_stores.py [--rounds 5] [--mebibytes 64] [--bodies 4] [--json FILE]

The server is SeaweedFS on this machine, so it competes with the clients for the cores and every rate is a
lower bound; the ratios are what to read. Clients take turns, in an order that rotates, so that a slow
minute slows all of them. A rate is the median over the rounds in 1e6 bytes per second of wall time; client
CPU is user and system time of this process, which does not include the server.
"""

import argparse
import asyncio
import io
import json
import random
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import boto3
from boto3.s3.transfer import TransferConfig

from gradientmail_core.mailbox import Mailbox
from gradientmail_core.mailbox.objectstore.location import Backend
from tests.core.mailbox.servers import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, seaweedfs

THREADS = 8  # of boto3's transfer manager, as people use it


class Client(Protocol):
    """One library moving a set of bodies, all at once."""

    def up(self, keys: list[str], bodies: list[bytes]) -> None: ...
    def down(self, keys: list[str], size: int) -> list[bytes]: ...
    def close(self) -> None: ...


class Boto3:
    """The transfer manager's multipart uploads and ranged downloads."""

    def __init__(self, server: S3Server) -> None:
        self._s3 = boto3.client(
            "s3",
            endpoint_url=server.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        self._transfer = TransferConfig(max_concurrency=THREADS)
        self._pool = ThreadPoolExecutor(4)

    def up(self, keys: list[str], bodies: list[bytes]) -> None:
        """Upload all."""
        list(self._pool.map(self._upload, keys, bodies))

    def down(self, keys: list[str], size: int) -> list[bytes]:
        """Download all."""
        return list(self._pool.map(self._download, keys))

    def close(self) -> None:
        """Release the threads."""
        self._pool.shutdown()

    def _upload(self, key: str, body: bytes) -> None:
        self._s3.upload_fileobj(io.BytesIO(body), BUCKET, key, Config=self._transfer)

    def _download(self, key: str) -> bytes:
        into = io.BytesIO()
        self._s3.download_fileobj(BUCKET, key, into, Config=self._transfer)
        return into.getvalue()


class Ours:
    """A mailbox of this library on an event loop, as the engine uses it."""

    def __init__(self, server: S3Server, backend: Backend) -> None:
        self._loop = asyncio.new_event_loop()
        self._mailbox: Mailbox = server.mailbox("", backend)

    def up(self, keys: list[str], bodies: list[bytes]) -> None:
        """Put all."""

        async def work() -> None:
            await asyncio.gather(*(self._mailbox.put(key, body) for key, body in zip(keys, bodies, strict=True)))

        self._loop.run_until_complete(work())

    def down(self, keys: list[str], size: int) -> list[bytes]:
        """Get all, with the limit that the engine gives."""
        found: list[bytes] = []

        async def work() -> None:
            for body in await asyncio.gather(*(self._mailbox.get(key, limit=2 * size) for key in keys)):
                assert body is not None
                found.append(body)

        self._loop.run_until_complete(work())
        return found

    def close(self) -> None:
        """Close mailbox and loop."""
        self._loop.run_until_complete(self._mailbox.close())
        self._loop.close()


@dataclass(frozen=True)
class Reading:
    """One transfer of all bodies: wall and client CPU seconds, and bytes."""

    seconds: float
    cpu: float
    size: int

    @property
    def rate(self) -> float:
        """1e6 bytes per second."""
        return self.size / self.seconds / 1e6

    @property
    def cpu_per_gigabyte(self) -> float:
        """Client CPU seconds per 1e9 bytes."""
        return self.cpu / self.size * 1e9


def timed(work: Callable[[], object], size: int) -> Reading:
    """Run ``work``, which moves ``size`` bytes."""
    cpu, start = _cpu(), time.perf_counter()
    work()
    return Reading(time.perf_counter() - start, _cpu() - cpu, size)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(clients: dict[str, Client], rounds: int, bodies: list[bytes]) -> dict[str, dict[str, list[Reading]]]:
    """Readings by client and direction; a first round warms connections and is not kept."""
    readings: dict[str, dict[str, list[Reading]]] = {name: {"up": [], "down": []} for name in clients}
    names, size = list(clients), len(bodies[0])
    for turn in range(rounds + 1):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        keys = {name: [f"{name}/{turn:03d}-{n}" for n in range(len(bodies))] for name in names}
        for name in order:
            readings[name]["up"].append(timed(partial(clients[name].up, keys[name], bodies), size * len(bodies)))
        for name in order:
            readings[name]["down"].append(_down(clients[name], keys[name], bodies))
    return {name: {way: found[1:] for way, found in ways.items()} for name, ways in readings.items()}


def _down(client: Client, keys: list[str], bodies: list[bytes]) -> Reading:
    found: list[bytes] = []
    reading = timed(lambda: found.extend(client.down(keys, len(bodies[0]))), sum(map(len, bodies)))
    assert found == bodies, "a body was changed"
    return reading


def table(readings: dict[str, dict[str, list[Reading]]]) -> dict[str, dict[str, float]]:
    """Medians, and the median over the rounds of each client's rate beside boto3's in the same round."""
    rows: dict[str, dict[str, float]] = {}
    for name, found in readings.items():
        row = rows.setdefault(name, {})
        for way in ("up", "down"):
            beside = zip(found[way], readings["boto3"][way], strict=True)
            row[f"{way}_mb_per_s"] = statistics.median(reading.rate for reading in found[way])
            row[f"{way}_of_boto3"] = statistics.median(ours.rate / theirs.rate for ours, theirs in beside)
            row[f"{way}_cpu_s_per_gb"] = statistics.median(reading.cpu_per_gigabyte for reading in found[way])
    return rows


def printed(rows: dict[str, dict[str, float]]) -> str:
    """The table for people."""
    columns = f"{'of boto3':>10}{'CPU s/GB':>10}"
    head = f"{'client':<10}{'up MB/s':>10}{columns}{'down MB/s':>12}{columns}"
    lines = [
        f"{name:<10}{row['up_mb_per_s']:>10.0f}{row['up_of_boto3']:>10.2f}{row['up_cpu_s_per_gb']:>10.2f}"
        f"{row['down_mb_per_s']:>12.0f}{row['down_of_boto3']:>10.2f}{row['down_cpu_s_per_gb']:>10.2f}"
        for name, row in rows.items()
    ]
    return "\n".join([head, *lines])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=64, help="size of one body")
    parser.add_argument("--bodies", type=int, default=4, help="bodies in flight")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    bodies = [random.Random(n).randbytes(options.mebibytes << 20) for n in range(options.bodies)]
    with seaweedfs() as server:
        clients: dict[str, Client] = {
            "boto3": Boto3(server),
            "obstore": Ours(server, "obstore"),
            "s3fs": Ours(server, "s3fs"),
        }
        rows = table(measured(clients, options.rounds, bodies))
        for client in clients.values():
            client.close()
    print(printed(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
