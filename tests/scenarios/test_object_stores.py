"""Real sessions on real object stores behind a bad line: nothing is lost that a directory would not lose.

The nodes are threads of this process with sessions and connections of their own, each training a few numbers.
"""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from gradientmail_core import DiLoCo, Session, open_mailbox
from gradientmail_core.errors import MailboxUnsupported
from gradientmail_core.events import Event, SnapshotRefused, StoreStalled
from gradientmail_core.mailbox import Mailbox
from gradientmail_core.protocol.records import RoundRecord
from gradientmail_core.sim.checks import forks, tape
from gradientmail_core.sim.world import ToyModel
from tests.core.mailbox.proxy import Proxy, Weather, proxied
from tests.core.mailbox.servers import ACCESS_KEY, SECRET_KEY, S3Server, restartable_seaweedfs

SETTINGS = DiLoCo(sync_every=10, fragments=2, quorum_size=3, overlap_steps=0, follow=False, delta_codec="F32")
"""A round waits for every node that lives, and training for the round: so what comes out depends on nothing else."""
STEPS = 40
STEP_SECONDS = 0.02


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@dataclasses.dataclass
class Trained:
    """What one node ended with: its model's numbers, the steps it took, and what it was told."""

    values: np.ndarray
    steps: int
    events: list[Event]


def train(url: str, name: str, steps: int, reached: Callable[[int], None]) -> Trained:
    """A whole node; every step moves each number by the same amount, whatever the machine."""
    model, events, taken = ToyModel(), list[Event](), 0
    with Session(
        model, mailbox=url, algorithm=SETTINGS, node=name, min_nodes=2, lease_timeout=120.0, callbacks=[events.append]
    ) as session:
        for _ in range(steps):
            model._flat -= 1e-3
            time.sleep(STEP_SECONDS)
            session.step(8)
            taken += 1
            reached(taken)
    return Trained(model._flat.copy(), taken, events)


class Fleet:
    """Two nodes in training; ``step`` is how far the first is."""

    def __init__(self, url: str, steps: int = STEPS) -> None:
        self.url, self.steps, self.step = url, steps, 0
        self._moved = threading.Condition()
        self._pool = ThreadPoolExecutor(2)
        self.nodes: list[Future[Trained]] = [
            self._pool.submit(train, url, name, steps, self._reached if name == "a" else lambda step: None)
            for name in "ab"
        ]

    def _reached(self, step: int) -> None:
        with self._moved:
            self.step = step
            self._moved.notify_all()

    def wait_for(self, step: int) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: self.step >= step or any(node.done() for node in self.nodes), 60.0)
        for node in self.nodes:
            assert not node.done() or node.result().steps

    def results(self, timeout: float = 90.0) -> list[Trained]:
        return [node.result(timeout) for node in self.nodes]


def judged(url: str) -> tuple[list[RoundRecord], list[int]]:
    """Every record of the run, and the rounds that fork."""

    async def work() -> tuple[list[RoundRecord], list[int]]:
        mailbox: Mailbox = open_mailbox(url)
        try:
            return await tape(mailbox), await forks(mailbox)
        finally:
            await mailbox.close()

    return asyncio.run(work())


def nothing_was_lost(trained: list[Trained], url: str, after_last: int = 0) -> None:
    """Every due round is there, no snapshot was refused, and every step of both nodes was merged.

    A node that has waited long reports early for the others' sake, and its reports stay early; so when training ends,
    ``after_last`` steps may have come after its last one, for a round that this run no longer has.
    """
    records, forked = judged(url)
    assert forked == [] and [node.steps for node in trained] == [STEPS] * 2
    assert len(records) >= 2 * STEPS // SETTINGS.sync_every
    assert not [refusal for record in records for refusal in record.refusals]
    assert not [event for node in trained for event in node.events if isinstance(event, SnapshotRefused)]
    for fragment, due in ((0, STEPS - SETTINGS.sync_every // 2), (1, STEPS)):
        for node in "ab":
            parts = [part for record in records if record.round % 2 == fragment for part in record.participants]
            merged = sum(part.steps for part in parts if part.node == node)
            assert due - after_last <= merged <= STEPS, (fragment, node)


@pytest.fixture(scope="module")
def on_a_directory(tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    """The same two nodes on a directory: what every store must come to."""
    url = tmp_path_factory.mktemp("mailbox").as_uri()
    trained = Fleet(url).results()
    nothing_was_lost(trained, url)
    return trained


def same_result(trained: list[Trained], expected: list[Trained]) -> None:
    for node, reference in zip(trained, expected, strict=True):
        assert np.array_equal(node.values, reference.values)


@pytest.mark.parametrize("backend", ["obstore", "s3fs"])
def test_an_object_store_comes_to_the_same_as_a_directory(
    seaweedfs_server: S3Server, backend: str, on_a_directory: list[Trained]
) -> None:
    url = seaweedfs_server.url(f"same-{backend}", "s3fs" if backend == "s3fs" else "obstore")
    trained = Fleet(url).results()
    nothing_was_lost(trained, url)
    same_result(trained, on_a_directory)


def test_a_server_killed_and_restarted_costs_no_round_and_no_steps() -> None:
    with restartable_seaweedfs() as restartable:
        url = restartable.server.url("restarted", "obstore")
        fleet = Fleet(url)
        fleet.wait_for(STEPS // 3)
        restartable.kill()
        time.sleep(2.0)
        restartable.start()
        trained = fleet.results()
        nothing_was_lost(trained, url, SETTINGS.sync_every // 2)


@contextmanager
def storm(server: S3Server, prefix: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy before ``server``, and the URL that leads through it."""
    with proxied(server.endpoint_url) as proxy:
        yield proxy, S3Server(proxy.url, server.bucket).url(prefix, "obstore")


@pytest.mark.parametrize("seconds", [4.0, pytest.param(60.0, marks=pytest.mark.soak)])
@pytest.mark.timeout(240)
def test_a_storm_of_503_costs_no_round_and_no_steps(seaweedfs_server: S3Server, seconds: float) -> None:
    with storm(seaweedfs_server, f"storm-{seconds:.0f}") as (proxy, url):
        fleet = Fleet(url)
        fleet.wait_for(STEPS // 3)
        proxy.weather = Weather(busy=1.0)
        time.sleep(seconds)
        proxy.weather = Weather()
        trained = fleet.results()
        nothing_was_lost(trained, url, SETTINGS.sync_every // 2)
        stalls = [event for node in trained for event in node.events if isinstance(event, StoreStalled)]
        assert seconds < 30.0 or stalls, "a long storm is told"


def test_a_slow_line_that_resets_and_falls_silent_costs_no_round_and_no_steps(seaweedfs_server: S3Server) -> None:
    with storm(seaweedfs_server, "line") as (proxy, url):
        proxy.weather = Weather(latency=0.005, bandwidth=5e6, refuse=0.05, cut=0.02, cut_answer=0.02)
        fleet = Fleet(url)
        fleet.wait_for(STEPS // 2)
        proxy.weather = Weather(silent=True)
        time.sleep(2.0)
        proxy.weather = Weather(latency=0.005)
        trained = fleet.results()
        nothing_was_lost(trained, url, SETTINGS.sync_every // 2)


def test_a_gateway_that_drops_the_condition_is_caught_by_the_run(moto_server: S3Server) -> None:
    with storm(moto_server, "unconditional") as (proxy, url):
        proxy.weather = Weather(unconditional=True)
        with pytest.raises(MailboxUnsupported) as caught:
            train(url, "a", 1, lambda step: None)
        assert "overwrote" in caught.value.cause and "gradientmail doctor" in caught.value.remedy


def test_a_node_that_joins_through_such_a_gateway_is_refused_and_harms_nobody(moto_server: S3Server) -> None:
    direct = moto_server.url("joined", "obstore")
    with storm(moto_server, "joined") as (proxy, url):
        proxy.weather = Weather(unconditional=True)
        fleet = Fleet(direct)
        fleet.wait_for(1)
        with pytest.raises(MailboxUnsupported, match="overwrites what exists"):
            train(url, "c", 1, lambda step: None)
        nothing_was_lost(fleet.results(), direct)
