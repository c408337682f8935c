"""How much of the time nodes train: published figures, the paper's own model, and the production engine on slow links.

    python benchmarks/utilization.py [--json FILE] [--rounds 8]

The setting is that of Factored Gossip DiLoCo (arXiv 2606.22768): 1.5B parameters, 8 nodes, 100 steps a round, links
of 200 and 100 Mbit/s. Compute utilization is training time by total time. The paper gives no step time; that of 53 %
for DiLoCo at 200 Mbit/s follows if a ring all-reduce of 16-bit values takes 0.89 of the round's computing, and then
its other figures must follow from the same: that is the first table.

The second table plays the engine itself on virtual time through a store. Every node has a link of that rate in each
direction, one object at a time in each, and 50 ms to the store; model and links are scaled down by the same factor,
so times are those of the full size. ``mixed`` is the share of starts that were mixed in time (of commits with the
node's own snapshot, for DiLoCo), ``partners`` the mean number of others whose gradients went into a step. Payloads
are not compressed further.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.algorithms.merge import WeightedMean
from gradientmail_core.algorithms.mixing import Pair
from gradientmail_core.events import Event, RoundMixed
from gradientmail_core.mailbox.base import Body, CreateOutcome, Entry
from gradientmail_core.mailbox.memory import MemoryMailbox
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.gossip import SimulatedGossip
from gradientmail_core.sim.loop import VirtualClock, VirtualLoop, run_virtually
from gradientmail_core.sim.world import SimulatedNode, ToyModel

PARAMETERS = 1.5e9
NODES = 8
RATIO_AT_200 = 0.89
RING_BYTES = 2.0 * 2.0 * (NODES - 1) / NODES
ROUND_SECONDS = RING_BYTES * PARAMETERS * 8 / 200e6 / RATIO_AT_200
STEPS = 20
SCALE = 2000
TENSORS = 7
SENSITIVE = ("@blocks:3",)
LATENCY_SECONDS = 0.05
LINKS = (200e6, 100e6)
DILOCO_ROUNDS = 4
PUBLISHED = {("DiLoCo", 200e6): 53, ("DiLoCo", 100e6): 36, ("GlobalM1", 200e6): 100, ("Sync-DP", 100e6): 1}


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm on one link: percent of the time spent training, and what mixing came of it."""

    algorithm: str
    link_mbit: float
    utilization: float
    published: int | None = None
    mixed: float | None = None
    partners: float | None = None
    gigabytes_up: float | None = None
    gigabytes_down: float | None = None


def modelled() -> list[Row]:
    """The paper's setting with all-reduces and direct exchange, from the one fitted ratio."""
    rows = []
    for link in LINKS:
        ring = RATIO_AT_200 * 200e6 / link
        pair = ring * NODES / (2 * (NODES - 1))
        figures = {
            "Sync-DP": 1 / (1 + 100 * ring),
            "DiLoCo": 1 / (1 + ring),
            "GlobalM1": 1 / max(1.0, ring),
            "GlobalM1LocalM2, pairs on 43 %": 1 / (max(1.0, ring) + 0.43 * pair),
            "GlobalM1LocalM2, pairs on all": 1 / (max(1.0, ring) + pair),
        }
        rows += [Row(name, link / 1e6, 100 * value, PUBLISHED.get((name, link))) for name, value in figures.items()]
    return rows


class Link:
    """A node's way to a shared mailbox: one object at a time in each direction, at so many bytes a second."""

    def __init__(self, inner: MemoryMailbox, clock: VirtualClock, bandwidth: float) -> None:
        self._inner, self._clock, self._bandwidth = inner, clock, bandwidth
        self._up, self._down = asyncio.Lock(), asyncio.Lock()
        self.bytes_up = self.bytes_down = 0

    @property
    def url(self) -> str:
        """The shared mailbox's."""
        return self._inner.url

    async def _sent(self, size: int) -> None:
        await self._clock.sleep(LATENCY_SECONDS)
        self.bytes_up += size
        async with self._up:
            await self._clock.sleep(size / self._bandwidth)

    async def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :meth:`Mailbox.get`."""
        await self._clock.sleep(LATENCY_SECONDS)
        body = await self._inner.get(key, limit=limit)
        self.bytes_down += len(body or b"")
        async with self._down:
            await self._clock.sleep(len(body or b"") / self._bandwidth)
        return body

    async def put(self, key: str, body: Body) -> None:
        """See :meth:`Mailbox.put`."""
        await self._sent(len(body))
        await self._inner.put(key, body)

    async def create(self, key: str, body: Body) -> CreateOutcome:
        """See :meth:`Mailbox.create`."""
        await self._sent(len(body))
        return await self._inner.create(key, body)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Entry]:
        """See :meth:`Mailbox.list`."""
        await self._clock.sleep(LATENCY_SECONDS)
        async for entry in self._inner.list(prefix, after=after):
            yield entry

    async def delete(self, key: str) -> None:
        """See :meth:`Mailbox.delete`."""
        await self._clock.sleep(LATENCY_SECONDS)
        await self._inner.delete(key)

    async def close(self) -> None:
        """Nothing to release."""


class Heavy(ToyModel):
    """A model of equal tensors whose step only takes time."""

    def __init__(self) -> None:
        super().__init__(tensors=TENSORS, elements=int(PARAMETERS / SCALE / TENSORS))

    def train(self, noise: np.random.Generator) -> None:
        """Move one tensor, so that deltas are not empty."""
        name = next(iter(self.values))
        self.values[name] -= np.float32(1e-3)


def variants(rounds: int) -> dict[str, DiLoCo | FactoredGossip]:
    """What is played: the paper's algorithms over a store, each with wider and with narrower formats.

    DiLoCo's fragments are due one after the other, so its barrier comes once a fragment; overlapped, it trains on.
    """
    overlapped = DiLoCo(
        sync_every=STEPS, fragments=NODES, in_flight=NODES, follow=False, quorum_size=NODES, merge=WeightedMean(),
        delta_codec="BF16", commit_codec="BF16", full_every=rounds, compression=None,
    )  # fmt: skip
    wide = FactoredGossip(sync_every=STEPS, fragments=NODES, timeout=600.0)
    peers = FactoredGossip.global_m1_local_m2(STEPS, fragments=NODES, timeout=600.0, mix2_on=SENSITIVE)
    pairs = replace(peers, mix2=Pair())
    noloco = FactoredGossip.noloco(STEPS, fragments=NODES, timeout=600.0)
    return {
        "DiLoCo with a barrier, BF16": replace(overlapped, overlap_steps=0),
        "DiLoCo overlapped, BF16": overlapped,
        "DiLoCo overlapped, INT4 up and INT8 down": replace(overlapped, delta_codec="INT4", commit_codec="INT8"),
        "GlobalM1, BF16": wide,
        "GlobalM1, BF16 starts and INT8 means": replace(wide, mean_codec="INT8"),
        "GlobalM1, INT4 starts and INT8 means": replace(wide, delta_codec="INT4", mean_codec="INT8"),
        "GlobalM1LocalM2 in pairs, BF16": pairs,
        "GlobalM1LocalM2 in pairs, INT4 and INT8": replace(pairs, delta_codec="INT4", mean_codec="INT8"),
        "GlobalM1LocalM2, BF16": peers,
        "GlobalM1LocalM2, INT4 and INT8": replace(peers, delta_codec="INT4", mean_codec="INT8"),
        "NoLoCo, BF16": noloco,
        "NoLoCo, INT4": replace(noloco, delta_codec="INT4", mean_codec="INT8"),
    }


def played(name: str, settings: DiLoCo | FactoredGossip, link: float, rounds: int) -> Row:
    """One run on virtual time; the first two rounds, in which nothing is to be mixed yet, do not count."""
    step_seconds = ROUND_SECONDS / STEPS
    warm = 2 * STEPS
    rounds = min(rounds, DILOCO_ROUNDS) if isinstance(settings, DiLoCo) else rounds

    async def main(loop: VirtualLoop) -> Row:
        shared = MemoryMailbox("run")
        nodes: list[SimulatedNode | SimulatedGossip] = []
        links: list[Link] = []
        merged: list[float] = []
        for number in range(NODES):
            clock = VirtualClock(loop)
            links.append(Link(shared, clock, link / 8 / SCALE))
            kind = SimulatedNode if isinstance(settings, DiLoCo) else SimulatedGossip
            node = kind(
                f"n{number}", links[-1], settings, clock, number, steps=10**9, step_seconds=step_seconds,  # type: ignore[arg-type]  # by kind
                min_nodes=NODES, timeouts=Timeouts(lease=3600.0, progress=36000.0), model=Heavy(),
            )  # fmt: skip
            if isinstance(node, SimulatedNode):
                node.on_commit = lambda commit: merged.append(float(commit.merged))
            nodes.append(node.launch())
        counted = await _counted(loop, nodes, links, warm, rounds * STEPS, merged)
        for node in nodes:
            await node.kill()
        return Row(name, link / 1e6, *counted)

    return run_virtually(main)


async def _counted(
    loop: VirtualLoop,
    nodes: list[SimulatedNode | SimulatedGossip],
    links: list[Link],
    first: int,
    last: int,
    merged: list[float],
) -> tuple[float, int | None, float | None, float | None, float, float]:
    """Utilization and traffic of all nodes between two steps of the run, from the second round on."""
    while min(_steps(node) for node in nodes) < first:
        await asyncio.sleep(1.0)
    merged.clear()
    started, before = loop.time(), [_steps(node) for node in nodes]
    up, down = sum(link.bytes_up for link in links), sum(link.bytes_down for link in links)
    while min(_steps(node) for node in nodes) < last:
        await asyncio.sleep(1.0)
    seconds = loop.time() - started
    trained = sum(_steps(node) - then for node, then in zip(nodes, before, strict=True))
    utilization = 100 * trained / NODES * ROUND_SECONDS / STEPS / seconds
    events = [event for node in nodes for when, event in node.events if when >= started]
    cycles = trained / STEPS / NODES
    traffic = [SCALE * (now - then) / NODES / cycles / 1e9 for now, then in (
        (sum(link.bytes_up for link in links), up), (sum(link.bytes_down for link in links), down))]  # fmt: skip
    return utilization, None, _mixed(events, merged), _partners(events), traffic[0], traffic[1]


def _steps(node: SimulatedNode | SimulatedGossip) -> int:
    return node.learner.state.local_step if node.learner is not None else 0


def _mixed(events: list[Event], merged: list[float]) -> float | None:
    """The share of starts that were mixed in time, or of commits that hold the node's snapshot."""
    moved = [event.mixed / NODES for event in events if isinstance(event, RoundMixed)]
    return float(np.mean(moved or merged)) if moved or merged else None


def _partners(events: list[Event]) -> float | None:
    counts = [len(event.partners) for event in events if isinstance(event, RoundMixed)]
    return float(np.mean(counts)) if counts else None


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| algorithm | Mbit/s | utilization | published | mixed in time | partners | GB up and down a round |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [
            row.algorithm,
            f"{row.link_mbit:.0f}",
            f"{row.utilization:.0f} %",
            "" if row.published is None else f"{row.published} %",
            "" if row.mixed is None else f"{100 * row.mixed:.0f} %",
            "" if row.partners is None else f"{row.partners:.1f}",
            "" if row.gigabytes_up is None else f"{row.gigabytes_up:.1f} / {row.gigabytes_down:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Compute both tables and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default="", help="play only algorithms whose name holds this")
    options = parser.parse_args()
    model, engine = modelled(), []
    print(table(model), flush=True)
    for link in LINKS:
        for name, settings in variants(options.rounds).items():
            if options.only in name:
                started = time.perf_counter()
                engine.append(played(name, settings, link, options.rounds))
                print(f"{engine[-1]} {time.perf_counter() - started:.0f} s", flush=True)
    print(table(engine))
    if options.json is not None:
        made = {"round_seconds": ROUND_SECONDS, "rounds": options.rounds}
        rows = {"modelled": [asdict(row) for row in model], "engine": [asdict(row) for row in engine]}
        options.json.write_text(json.dumps({**made, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
