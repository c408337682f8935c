"""Hand-offs: whole or not at all, the newest there is, bounded, and nothing of a stranger's."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gradientmail_core.engine import handoff
from gradientmail_core.engine.handoff import ANEW, OLDER, HandoffStore
from gradientmail_core.events import HandoffSkipped
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.mailbox.base import Body
from tests.core.engine.parts import Place, virtually
from tests.core.protocol.belongings import same, things

RUN = "5a" * 16


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "PART_BYTES", 256)


def test_the_newest_replaces_what_was_there_in_parts_that_are_bounded() -> None:
    async def main(place: Place) -> None:
        store = HandoffStore(place.host("a"), RUN)
        assert await store.newest() is None
        for value in (1.0, 2.0, 3.0):
            written = await store.put(things(value))
        assert same(await store.newest(), things(3.0))
        keys = place.listed("handoff/a/")
        assert len({key.rsplit("/", 1)[0] for key in keys}) == 1 and len(keys) == 1 + -(-written // 256)

    virtually(main)


def test_another_process_of_the_node_reads_it_and_others_do_not() -> None:
    async def main(place: Place) -> None:
        await HandoffStore(place.host("a"), RUN).put(things(1.0))
        again = HandoffStore(place.host("a"), RUN)
        assert same(await again.newest(), things(1.0))
        assert await HandoffStore(place.host("a-1"), RUN).newest() is None
        assert await HandoffStore(place.host("a"), "6b" * 16).newest() is None, "of another run"
        await again.put(things(2.0))
        assert same(await HandoffStore(place.host("a"), RUN).newest(), things(2.0))

    virtually(main)


def test_a_damaged_part_makes_it_none_and_the_older_counts() -> None:
    async def main(place: Place) -> None:
        older, newer = HandoffStore(place.host("a"), RUN), HandoffStore(place.host("a"), RUN)
        await older.put(things(1.0))
        kept = {key: await place.mailbox.get(key) for key in place.listed("handoff/")}
        await newer.put(things(2.0))
        victim = next(key for key in place.listed("handoff/") if key.endswith("/0001"))
        await place.mailbox.put(victim, b"junk")
        assert await newer.newest() is None
        for key, body in kept.items():
            await place.mailbox.put(key, body or b"")
        assert same(await newer.newest(), things(1.0))

    virtually(main)


def cut(body: bytes) -> bytes:
    return body[: len(body) // 2]


def flipped(body: bytes) -> bytes:
    return body[:10] + bytes([body[10] ^ 1]) + body[11:]


@pytest.mark.parametrize("has_older", [False, True])
@pytest.mark.parametrize(
    ("part", "damage", "reason"),
    [
        ("0001", cut, "its part 0001 is damaged"),
        ("0001", flipped, "its part 0001 is damaged"),
        ("0001", None, "its part 0001 is missing"),
        ("record", cut, "its record is"),
        ("record", flipped, "its record is"),
        ("record", None, "never finished"),
    ],
)
def test_one_that_is_damaged_or_unfinished_is_told_with_what_is_gone_on_from(
    part: str, damage: Callable[[bytes], bytes] | None, reason: str, has_older: bool
) -> None:
    async def main(place: Place) -> None:
        host = place.host("a")
        await HandoffStore(host, RUN).put(things(1.0))
        older = {key: await place.mailbox.get(key) or b"" for key in place.listed("handoff/")}
        await HandoffStore(host, RUN).put(things(2.0))
        assert not place.events(HandoffSkipped)
        victim = next(key for key in place.listed("handoff/") if key.endswith(part))
        body = await place.mailbox.get(victim) or b""
        await place.mailbox.delete(victim)
        if damage is not None:
            await place.mailbox.put(victim, damage(body))
        for key, kept in older.items() if has_older else ():
            await place.mailbox.put(key, kept)
        found = await HandoffStore(host, RUN).newest()
        assert found is None if not has_older else same(found, things(1.0))
        told = place.events(HandoffSkipped)
        assert [(event.node, event.name) for event in told] == [("a", victim.rsplit("/", 1)[0])]
        assert reason in told[0].reason
        assert told[0].instead == (OLDER if has_older else ANEW)

    virtually(main)


class Mortal(MemoryMailbox):
    """Dies before or after its ``n``-th operation."""

    def __init__(self, inner: MemoryMailbox, after: int) -> None:
        super().__init__("mortal")
        self._inner, self._left = inner, after
        self.list, self.get = inner.list, inner.get  # type: ignore[method-assign]  # the rest as it is

    def _tick(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise asyncio.CancelledError

    async def put(self, key: str, body: Body) -> None:
        self._tick()
        await self._inner.put(key, body)
        self._tick()

    async def delete(self, key: str) -> None:
        self._tick()
        await self._inner.delete(key)
        self._tick()


def test_killed_at_any_write_the_older_or_the_newer_is_whole_and_the_rest_is_swept() -> None:
    async def main(place: Place) -> None:
        for after in range(60):
            place.mailbox = MemoryMailbox("run")
            await HandoffStore(place.host("a"), RUN).put(things(1.0))
            dying: Any = place.host("a", Mortal(place.mailbox, after))
            died = False
            try:
                await HandoffStore(dying, RUN).put(things(2.0))
            except asyncio.CancelledError:
                died = True
            again = HandoffStore(place.host("a"), RUN)
            found = await again.newest()
            assert found is not None and found.plain["rate"] in [1.0, 2.0]
            assert same(found, things(1.0 if found.plain["rate"] == 1.0 else 2.0))
            await again.put(things(3.0))
            assert same(await again.newest(), things(3.0))
            assert len({key.rsplit("/", 1)[0] for key in place.listed("handoff/")}) == 1
            if not died:
                return
        raise AssertionError("it never came through")

    virtually(main)
