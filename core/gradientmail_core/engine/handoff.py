"""What a node needs to go on without a checkpoint of its own, kept in the mailbox under its name.

``handoff/{node}/{number}-{incarnation}/{part}`` are the parts of one body, at most :data:`PART_BYTES` each, and
``.../record`` names their digests. No two processes write the same key, so what a dead one wrote may land late. The
record is written after the parts, and older numbers are removed after the record: whenever the process dies, one whole
hand-off is there, the older or the newer. What a crash leaves goes with the next one. One node keeps one hand-off, so
what lies there is bounded by twice its size. One that is not what its record says, or is too large, counts as none,
and an event says so.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradientmail_core.engine.run import Host
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.events import HandoffSkipped
from gradientmail_core.protocol.belongings import Belongings, packed, unpacked
from gradientmail_core.protocol.exchange import bounded_get
from gradientmail_core.protocol.fields import HEX, SHA256, FieldRefused, Rejected, canonical_json, guarded, parse_object
from gradientmail_core.protocol.records import FORMAT, RECORD_LONGEST, digest

HANDOFFS = "handoff/"
NUMBER_DIGITS = 10
PART_BYTES = 64 * 2**20
PARTS_MOST = 4096
BYTES_MOST = 64 * 2**30
OLDER = "going on from the hand-off before it"
ANEW = "going on from the run's newest commits, with all else as in a new node"
_KEY = re.compile(r"handoff/([^/]+)/(\d{10}-[0-9a-f]{16})/(record|\d{4})\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class HandoffKey:
    """An object of a hand-off: whose, in which folder (which sort by age), and whether it is the record."""

    node: str
    folder: str
    is_record: bool


def parse_handoff(key: str) -> HandoffKey | None:
    """The meaning of a key under ``handoff/``, or None for a stranger's."""
    match = _KEY.match(key)
    return None if match is None else HandoffKey(match[1], match[2], match[3] == "record")


class HandoffStore:
    """One node's hand-offs in a run's mailbox."""

    def __init__(self, host: Host, run: str) -> None:
        self._host = host
        self._run = run
        self._prefix = f"{HANDOFFS}{host.node}/"
        self._number: int | None = None

    async def put(self, belongings: Belongings) -> int:
        """Keep ``belongings`` in the place of what was kept before; the bytes written.

        Raises :class:`ConfigurationError` for what is too large or no numbers.
        """
        body = await self._host.clock.compute(lambda: packed(belongings))
        if len(body) > min(BYTES_MOST, PARTS_MOST * PART_BYTES):
            raise ConfigurationError(f"A hand-off of {len(body):,} bytes is too large.", "Keep checkpoints on disk.")
        folder = f"{self._prefix}{await self._next():010d}-{self._host.incarnation}/"
        digests = []
        for index, start in enumerate(range(0, len(body), PART_BYTES)):
            part = body[start : start + PART_BYTES]
            digests.append(digest(part))
            await self._host.mailbox.put(f"{folder}{index:04d}", part)
        record = {"run": self._run, "node": self._host.node, "size": len(body), "parts": digests, "format": FORMAT}
        await self._host.mailbox.put(f"{folder}record", canonical_json(record))
        await self._sweep(folder)
        return len(body)

    async def newest(self) -> Belongings | None:
        """The newest whole hand-off of this node in this run, None if there is none; newer ones are told of."""
        skipped: dict[str, str] = {}
        whole: Belongings | None = None
        for folder in sorted({folder for folder, _ in await self._listed()}, reverse=True):
            found = await self._read(folder)
            if isinstance(found, Belongings):
                whole = found
                break
            skipped[folder] = found.reason
        for folder, reason in skipped.items():
            instead = ANEW if whole is None else OLDER
            self._host.emit(HandoffSkipped(self._host.node, folder.rstrip("/"), reason, instead))
        return whole

    async def _next(self) -> int:
        if self._number is None:
            folders = [folder for folder, _ in await self._listed()]
            self._number = max((int(folder[len(self._prefix) :][:NUMBER_DIGITS]) for folder in folders), default=-1)
        self._number += 1
        return self._number

    async def _listed(self) -> list[tuple[str, str]]:
        """The folders and keys of this node's hand-offs."""
        keys = [entry.key async for entry in self._host.mailbox.list(self._prefix)]
        ours = [(key, found) for key in keys if (found := parse_handoff(key)) and found.node == self._host.node]
        return [(f"{self._prefix}{found.folder}/", key) for key, found in ours]

    async def _sweep(self, newest: str) -> None:
        """Remove older hand-offs, their records first."""
        end = len(self._prefix) + NUMBER_DIGITS
        old = [key for folder, key in await self._listed() if folder != newest and folder[:end] <= newest[:end]]
        for key in sorted(old, key=lambda key: not key.endswith("/record")):
            await self._host.mailbox.delete(key)

    async def _read(self, folder: str) -> Belongings | Rejected:
        text = await bounded_get(self._host.mailbox, f"{folder}record", RECORD_LONGEST)
        if text is None:
            return Rejected("it was never finished")
        record = guarded(lambda: self._parsed(text))
        if isinstance(record, Rejected):
            return Rejected(f"its record is {record.reason}")
        body = await self._body(folder, *record)
        return body if isinstance(body, Rejected) else unpacked(body)

    def _parsed(self, text: bytes) -> tuple[int, Sequence[str]]:
        fields = parse_object(text, RECORD_LONGEST)
        if fields.count("format") != FORMAT:
            raise FieldRefused("of another format")
        if fields.text("run", HEX) != self._run or fields.text("node", longest=64) != self._host.node:
            raise FieldRefused("of another run or node")
        parts = [part for part in fields.items("parts", PARTS_MOST) if isinstance(part, str) and SHA256.match(part)]
        return fields.count("size", BYTES_MOST), parts

    async def _body(self, folder: str, size: int, digests: Sequence[str]) -> bytes | Rejected:
        found = bytearray()
        for index, wanted in enumerate(digests):
            part = await bounded_get(self._host.mailbox, f"{folder}{index:04d}", min(PART_BYTES, size - len(found)))
            if part is None:
                return Rejected(f"its part {index:04d} is missing")
            if digest(part) != wanted:
                return Rejected(f"its part {index:04d} is damaged")
            found += part
        return bytes(found) if len(found) == size else Rejected("its size is not what its record says")
