"""Whole runs with one bad node of four, and with strangers' objects everywhere: the clean nodes' run, bit for bit.

With ``overlap_steps=0`` and a quorum of all three clean nodes a round's content does not depend on timing, so a run
with poison in it can be held against one without, round by round and byte by byte.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.engine.closing import SNAPSHOT_METADATA
from gradientmail_core.events import ObjectIgnored
from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry, Mailbox
from gradientmail_core.protocol.exchange import Decided, read_round
from gradientmail_core.protocol.keys import ClaimKey, DeltaKey, HeadKey, WantedKey, parse_live, tape_key
from gradientmail_core.protocol.records import RoundRecord
from gradientmail_core.sim.checks import manifest_of
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.payload import Malformed, Payload, encode_payload, parse_payload
from gradientmail_core.tensors.schema import FragmentLayout, Piece
from tests.core.engine.parts import SETTINGS, Place, run_of, virtually

TOGETHER = replace(SETTINGS, overlap_steps=0, quorum_size=3, sync_every=10, follow=False)
PAIR = replace(TOGETHER, quorum_size=1)
LAYOUTS = run_of(TOGETHER).layouts
CODEC = codec_named("F32")
STEPS = 160
VERSIONS = STEPS // TOGETHER.sync_every

Forge = Callable[[Payload, FragmentLayout], bytes]


def values_of(payload: Payload) -> Any:
    return payload.parts[0].view("<f4").copy()


def written(layout: FragmentLayout, values: Any, record: dict[str, Any], tokens: str | None = None) -> bytes:
    """A snapshot of these values whose record has the right digest, and its tokens in so many characters."""

    def describe(data: str) -> dict[str, str]:
        text = json.dumps({**record, "data": data}, sort_keys=True, separators=(",", ":"))
        plain = f'"tokens":{record["tokens"]}'
        return {SNAPSHOT_METADATA: text if tokens is None else text.replace(plain, f'"tokens":{tokens}')}

    return bytes(encode_payload(layout, CODEC, values, describe))


def recorded(payload: Payload) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(payload.metadata[SNAPSHOT_METADATA])
    return found


def filled(value: float) -> Forge:
    return lambda payload, layout: written(layout, np.full(layout.size, value, np.float32), recorded(payload))


def grown(factor: float) -> Forge:
    return lambda payload, layout: written(layout, values_of(payload) * np.float32(factor), recorded(payload))


def claiming(tokens: str) -> Forge:
    return lambda payload, layout: written(layout, values_of(payload), recorded(payload), tokens)


def changed(**fields: Any) -> Forge:
    return lambda payload, layout: written(layout, values_of(payload), {**recorded(payload), **fields})


def reshaped(payload: Payload, layout: FragmentLayout) -> bytes:
    other = FragmentLayout(layout.fragment, (Piece("another", (3, 5), 0),))
    return written(other, np.ones(15, np.float32), recorded(payload))


def cut(payload: Payload, layout: FragmentLayout) -> bytes:
    return written(layout, values_of(payload), recorded(payload))[:-7]


POISON: tuple[tuple[Forge, set[str]], ...] = (
    (filled(1e30), {"outlier"}),
    (filled(np.nan), {"nonfinite"}),
    (filled(np.inf), {"nonfinite"}),
    (cut, {"corrupt"}),
    (reshaped, {"schema"}),
    (lambda payload, layout: b"\x80\x04\x95 pickled", {"corrupt"}),
    (claiming("-1"), {"run"}),
    (claiming(str(10**200)), {"run"}),
    (claiming('"7"'), {"run"}),
    (claiming("NaN"), {"run"}),
    (changed(steps=0), {"zero_steps"}),
    (changed(base="f" * 64), {"stale"}),
    (changed(run="e" * 32), {"run"}),
    (grown(1e4), {"outlier"}),
    (filled(-1e30), {"outlier"}),
    (filled(3e38), {"outlier", "nonfinite"}),
)
"""The finer outliers last: what is usual is known from a chain's fourth round on, what is absurd from its first."""


class Poisoner(Mailbox):
    """A way to the store that turns the node's snapshot for version ``v`` into the ``v``-th poison."""

    def __init__(self, store: Mailbox, poison: Sequence[tuple[Forge, set[str]]] = POISON) -> None:
        self._store, self._poison = store, poison
        self.sent: dict[int, set[str]] = {}

    @property
    def url(self) -> str:
        return self._store.url

    async def put(self, key: str, body: Body) -> None:
        delta = parse_live(key)
        if isinstance(delta, DeltaKey):
            version, fragment = divmod(delta.round, TOGETHER.fragments)
            payload = parse_payload(bytes(body), LAYOUTS[fragment], CODEC)
            assert not isinstance(payload, Malformed)
            forge, reasons = self._poison[(version - 1) % len(self._poison)]
            self.sent[delta.round] = reasons
            body = forge(payload, LAYOUTS[fragment])
        await self._store.put(key, body)

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        return await self._store.get(key, limit=limit)

    async def create(self, key: str, body: Body) -> CreateOutcome:
        return await self._store.create(key, body)

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        return self._store.list(prefix, after=after)

    async def delete(self, key: str) -> None:
        await self._store.delete(key)

    async def close(self) -> None:
        await self._store.close()


@dataclass(frozen=True, slots=True)
class Played:
    """A finished run: its records in order, and what its nodes ignored."""

    records: list[RoundRecord]
    ignored: list[tuple[str, str]]

    @property
    def committed(self) -> list[tuple[int, list[str], list[str]]]:
        """Of each round: its number, who took part, and the digests of all that it committed."""
        return [
            (one.round, [who.node for who in one.participants], [section.sha256 for section in one.sections])
            for one in self.records
        ]


def played(
    beside: Callable[[Place], Awaitable[None]] | None = None,
    min_nodes: int = 3,
    names: str = "abc",
    settings: DiLoCo = TOGETHER,
) -> Played:
    """Clean nodes train ``STEPS`` steps together, with something beside them."""

    async def main(place: Place) -> Played:
        nodes = [place.launch(name, settings=settings, steps=STEPS, min_nodes=min_nodes) for name in names]
        other = asyncio.ensure_future(beside(place)) if beside is not None else None
        await asyncio.gather(*(node.task for node in nodes if node.task is not None))
        if other is not None:
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
        ignored = [(node, event.key) for node, event in place.log if isinstance(event, ObjectIgnored)]
        return Played(await chain(place), ignored)

    return virtually(main)


async def chain(place: Place) -> list[RoundRecord]:
    """Every committed record, whatever lies beside them."""
    manifest, _ = await manifest_of(place.mailbox)
    found, round = [], TOGETHER.fragments
    while isinstance(state := await read_round(place.mailbox, manifest.run, round), Decided):
        found.append(state.record)
        round += 1
    return found


@pytest.fixture(scope="module")
def clean() -> Played:
    """The clean nodes alone."""
    found = played()
    assert len(found.records) >= VERSIONS * TOGETHER.fragments
    assert all(nodes == ["a", "b", "c"] for _, nodes, _ in found.committed)
    return found


def test_a_bad_node_costs_no_round_and_no_bit_and_each_rejection_is_recorded_once(clean: Played) -> None:
    poisoner: list[Poisoner] = []

    async def bad(place: Place) -> None:
        node = place.launch("d", settings=TOGETHER, steps=STEPS, role="learner", min_nodes=4, step_seconds=0.09)
        poisoner.append(Poisoner(node.mailbox))
        node.mailbox = poisoner[0]
        assert node.task is not None
        await node.task

    found = played(bad, min_nodes=4)
    assert found.committed == clean.committed
    sent = poisoner[0].sent
    assert len(sent) == len(found.records) and len({*map(str, sent.values())}) >= 7, "every kind came in turn"
    for record in found.records:
        assert [refusal.node for refusal in record.refusals] == ["d"]
        assert record.refusals[0].reason in sent[record.round], (record.round, record.refusals)


def test_of_two_nodes_the_one_that_is_absurd_from_the_first_round_on_is_refused() -> None:
    """Whichever comes first; nothing that it sends is in a commit."""
    for pace in (0.05, 0.09):

        async def bad(place: Place, pace: float = pace) -> None:
            node = place.launch("d", settings=PAIR, steps=STEPS, role="learner", min_nodes=2, step_seconds=pace)
            node.mailbox = Poisoner(node.mailbox, ((grown(1e6), {"outlier"}),))
            assert node.task is not None
            await node.task

        found = played(bad, min_nodes=2, names="a", settings=PAIR)
        assert len(found.records) >= VERSIONS * PAIR.fragments
        assert {tuple(nodes) for _, nodes, _ in found.committed} == {("a",)}
        assert {refusal.reason for record in found.records for refusal in record.refusals} == {"outlier"}


PREFIXES = (
    "live/leases/e/0000000001-t0-nothex", "live/leases/e/readme", "live/heads/000/readme", "live/heads/999/0000000004",
    HeadKey(0, 10**9).path, "live/claims/0000000008/junk", ClaimKey(8, 0).path, "live/wanted/x", WantedKey(3).path,
    "live/deltas/readme", "live/gossip/0000000001/roster", "live/gossip/x", "live/x", "blobs/readme",
    "blobs/0000000005/a-" + "0" * 64 + ".safetensors", "blobs/9999999999/x", "units/q/0/x", "units/x", "ranks/x",
    "ranks/0/0", "barriers/b/x", "creation/77", "creation/0", "syncer/x", "syncer/000000", "handoff/a/x/record",
    "handoff/b/0000000000-0000000000000000/record", "probe/x", "doctor/x", "notes", "tape/x",
)  # fmt: skip
SEEN = {key for key in PREFIXES if key.startswith("live/") and parse_live(key) is None}


def test_junk_under_every_prefix_costs_no_round_and_no_bit_and_is_reported_once(clean: Played) -> None:
    """Also in the places of records to come, of snapshots by nobody, and of claims."""
    spent = [tape_key(version * TOGETHER.fragments + n, 0) for version in (3, 8, 13) for n in (0, 1)]
    spent.append(tape_key(8 * TOGETHER.fragments, 1))

    async def littering(place: Place) -> None:
        while not place.listed("manifest.json"):
            await asyncio.sleep(0.05)
        for number, key in enumerate((*PREFIXES, *spent)):
            await place.mailbox.put(key, (b"", b"{}", b"\x00 nobody's object", b"[" * 10_000)[number % 4])
            await asyncio.sleep(0.01)
        for round in range(4, len(clean.records), 3):
            await place.mailbox.put(DeltaKey(round, "zz").path, b"nobody's snapshot")

    found = played(littering)
    assert found.committed == clean.committed
    strangers = [refusal for record in found.records for refusal in record.refusals]
    assert {(refusal.node, refusal.reason) for refusal in strangers} == {("zz", "corrupt")}
    assert len(strangers) <= len(found.records) // 3
    assert len(set(found.ignored)) == len(found.ignored), "once for each node and object"
    told = {key for _, key in found.ignored}
    assert told >= SEEN | set(spent), SEEN | set(spent) - told
