"""What must hold of a run, read back from its store alone."""

from functools import lru_cache

from gradientmail_core.engine.loading import Source, parameters
from gradientmail_core.mailbox.base import Mailbox
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.keys import MANIFEST, tape_key
from gradientmail_core.protocol.plan import manifest_layouts
from gradientmail_core.protocol.records import Manifest, RoundRecord, Section, digest, parse_manifest, parse_round
from gradientmail_core.sim.loop import VirtualClock
from gradientmail_core.tensors.model import Flat


async def manifest_of(mailbox: Mailbox) -> tuple[Manifest, str]:
    """The run's manifest and its digest."""
    body = await mailbox.get(MANIFEST)
    assert body is not None, "the run has no manifest"
    manifest = _manifest(body)
    assert isinstance(manifest, Manifest), manifest
    return manifest, digest(body)


_manifest = lru_cache(maxsize=16)(parse_manifest)
_round = lru_cache(maxsize=8192)(parse_round)  # whoever watches a run reads its records again and again


async def tape(mailbox: Mailbox) -> list[RoundRecord]:
    """Every committed record, in the order of rounds; in each round the first slot that is a record."""
    manifest, _ = await manifest_of(mailbox)
    records: dict[int, RoundRecord] = {}
    async for entry in mailbox.list("tape/"):
        round, slot = (int(part) for part in entry.key.rsplit("/", 1)[1].split("-"))
        body = await mailbox.get(tape_key(round, slot))
        record = _round(body or b"", manifest.run, round)
        if isinstance(record, RoundRecord):
            records.setdefault(round, record)
    return [records[round] for round in sorted(records)]


async def forks(mailbox: Mailbox) -> list[int]:
    """Rounds whose record does not name its predecessor's bytes, or whose predecessor is missing."""
    manifest, manifest_digest = await manifest_of(mailbox)
    fragments = len(manifest.plan)
    heads = {fragment: (fragment, manifest_digest) for fragment in range(fragments)}
    broken: list[int] = []
    for record in await tape(mailbox):
        fragment = record.round % fragments
        previous, previous_digest = heads[fragment]
        if record.round != previous + fragments or record.prev != previous_digest:
            broken.append(record.round)
        heads[fragment] = (record.round, digest(record.encoded()))
    return broken


async def committed_parameters(mailbox: Mailbox) -> dict[str, Flat]:
    """The newest committed parameters by tensor piece."""
    manifest, _ = await manifest_of(mailbox)
    layouts = manifest_layouts(manifest)
    assert not isinstance(layouts, Rejected), layouts
    heads: dict[int, tuple[int, tuple[Section, ...]]] = {}
    heads.update((fragment, (0, (section,))) for fragment, section in enumerate(manifest.theta))
    for record in await tape(mailbox):
        heads[record.round % len(layouts)] = (record.round // len(layouts), record.sections)
    values: dict[str, Flat] = {}
    for layout in layouts:
        flat = await parameters(Source(mailbox, _Inline(), manifest, layout), *heads[layout.fragment])
        assert not isinstance(flat, Rejected), (heads[layout.fragment], flat)
        for piece in layout.pieces:
            values[piece.key] = flat[piece.offset : piece.offset + piece.elements].reshape(piece.shape)
    return values


class _Inline(VirtualClock):
    """Computes inline; never asked for time."""

    def __init__(self) -> None:
        pass
