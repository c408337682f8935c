"""Real processes that share nothing but a directory: SIGKILL of a closer and of a learner, and a late join."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradientmail_core.clock import SystemClock
from gradientmail_core.engine.loading import Source, parameters
from gradientmail_core.mailbox import DirectoryMailbox
from gradientmail_core.protocol.plan import manifest_layouts
from gradientmail_core.protocol.records import RoundRecord
from gradientmail_core.sim.checks import forks, manifest_of, tape
from tests.scenarios.plain_node import LEASE_SECONDS, model, parameters_digest

SCRIPT = Path(__file__).with_name("plain_node.py")
PATIENCE = 60.0


class Fleet:
    """Node processes around one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mailbox = DirectoryMailbox(directory)
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, steps: int, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), name, str(self.directory), str(steps), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        return self.processes[name]

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def records(self) -> list[RoundRecord]:
        if not (self.directory / "manifest.json").exists():
            return []
        return asyncio.run(tape(self.mailbox))

    def wait_for_rounds(self, count: int) -> list[RoundRecord]:
        return self.wait_until(lambda records: len(records) >= count)

    def wait_until(self, holds: Any) -> list[RoundRecord]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            records = self.records()
            if holds(records):
                return records
            time.sleep(0.1)
        raise AssertionError(f"nothing happened for {PATIENCE} s; {len(self.records())} rounds")

    def result(self, name: str) -> dict[str, Any]:
        output, _ = self.processes[name].communicate(timeout=PATIENCE)
        assert self.processes[name].returncode == 0, output
        return json.loads(output.strip().splitlines()[-1])  # type: ignore[no-any-return]  # as the program printed it

    def committed_digest(self, versions: list[int]) -> str:
        """The digest a model has that holds exactly these committed versions."""
        return asyncio.run(self._committed_digest(versions))

    async def _committed_digest(self, versions: list[int]) -> str:
        from gradientmail_core.adapters import resolve

        manifest, _ = await manifest_of(self.mailbox)
        layouts = manifest_layouts(manifest)
        assert isinstance(layouts, tuple)
        records = {record.round: record for record in await tape(self.mailbox)}
        module = model()
        adapter = resolve(module)
        loop = SystemClock()
        for layout, version in zip(layouts, versions, strict=True):
            record = records[version * len(layouts) + layout.fragment]
            values = await parameters(Source(self.mailbox, loop, manifest, layout), version, record.sections)
            adapter.write(layout, values)  # type: ignore[arg-type]  # as the store gave it
        return parameters_digest(module)

    def assert_on_committed_bytes(self, name: str) -> None:
        result = self.result(name)
        assert result["digest"] == self.committed_digest(result["versions"]), name

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path / "run")
    yield fleet
    fleet.close()


def test_two_processes_train_one_model(fleet: Fleet) -> None:
    for name in ("a", "b"):
        fleet.start(name, 200, "--min-nodes", "2")
    for name in ("a", "b"):
        fleet.assert_on_committed_bytes(name)
    records = fleet.records()
    assert len(records) >= 30
    assert sum(len(record.participants) == 2 for record in records) >= 0.8 * len(records)
    assert asyncio.run(forks(fleet.mailbox)) == []


def test_closer_and_learner_killed_then_another_joins(fleet: Fleet) -> None:
    for name in ("a", "b", "c"):
        fleet.start(name, 700, "--min-nodes", "3")
    records = fleet.wait_for_rounds(12)
    closer = Counter(record.closer for record in records[-4:]).most_common(1)[0][0]
    fleet.kill(closer)
    orphaned = [record.round % 4 for record in fleet.records()[-4:] if record.closer == closer]
    assert orphaned, "the killed node was the named closer of a fragment"
    before, killed_at = len(fleet.records()), time.monotonic()
    fleet.wait_until(lambda records: any(record.node != closer for record in records[before:]))
    assert time.monotonic() - killed_at <= LEASE_SECONDS
    fleet.wait_until(
        lambda records: {record.round % 4 for record in records[before:] if record.node != closer} >= set(orphaned)
    )
    assert time.monotonic() - killed_at <= LEASE_SECONDS + 5.0
    survivors = sorted({"a", "b", "c"} - {closer})
    fleet.start("d", 150)
    fleet.wait_until(lambda records: any(part.node == "d" for record in records for part in record.participants))
    fleet.kill(survivors[0])
    before, killed_at = len(fleet.records()), time.monotonic()
    fleet.wait_until(lambda records: len(records) > before)
    assert time.monotonic() - killed_at <= LEASE_SECONDS
    for name in ("d", survivors[1]):
        fleet.assert_on_committed_bytes(name)
    assert asyncio.run(forks(fleet.mailbox)) == []
