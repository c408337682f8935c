"""Sixteen processes create the same keys: every key has one winner, and holds the winner's bytes whole."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gradientmail_core.mailbox import Mailbox, open_mailbox
from gradientmail_core.mailbox.objectstore.location import Backend
from tests.core.mailbox.racers import body_of, raced_key
from tests.core.mailbox.servers import AzureServer, S3Server, environment

RACERS = 16
ROOT = Path(__file__).parents[3]


def raced(url: str, keys: int) -> dict[str, int]:
    """The winner of every key; two winners of one are an assertion."""
    command = [sys.executable, "-m", "tests.core.mailbox.racers", url, str(RACERS), str(keys)]
    finished = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    reports = [json.loads(line) for line in finished.stdout.splitlines()]
    assert sorted(report["racer"] for report in reports) == list(range(RACERS))
    winners = Counter(key for report in reports for key in report["won"])
    assert winners == {raced_key(number): 1 for number in range(keys)}
    return {key: report["racer"] for report in reports for key in report["won"]}


async def holds_winners(mailbox: Mailbox, winners: dict[str, int]) -> None:
    for key, racer in winners.items():
        assert await mailbox.get(key) == body_of(racer, key)
    await mailbox.close()


def test_a_directory_has_one_winner(tmp_path: Path) -> None:
    winners = raced(tmp_path.as_uri(), 100)
    assert len(set(winners.values())) > 1, "one racer was always first: no race took place"
    asyncio.run(holds_winners(open_mailbox(tmp_path), winners))
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("backend", ["obstore", "s3fs"])
def test_an_object_store_has_one_winner(seaweedfs_server: S3Server, backend: Backend) -> None:
    winners = raced(seaweedfs_server.url(f"races-{backend}", backend), 3)
    asyncio.run(holds_winners(seaweedfs_server.mailbox(f"races-{backend}", backend), winners))


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_azure_has_one_winner(azure_server: AzureServer, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azure_server.key)
    url = azure_server.url(f"races-{backend}", backend)
    asyncio.run(holds_winners(open_mailbox(url), raced(url, 5)))
