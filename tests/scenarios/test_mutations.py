"""The judge bites: with a rule of the protocol broken on purpose, a random run is found at fault."""

import pytest

from gradientmail_core.engine import sweeping
from gradientmail_core.mailbox import Body, CreateOutcome, MemoryMailbox
from gradientmail_core.protocol import exchange
from gradientmail_core.sim.swarm import play, scenario


def test_a_create_that_overwrites_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def overwriting(self: MemoryMailbox, key: str, body: Body) -> CreateOutcome:
        await self.put(key, body)
        return CreateOutcome.CREATED

    monkeypatch.setattr(MemoryMailbox, "create", overwriting)
    assert any(play(scenario(seed)).violations for seed in range(4, 10))


def test_sweeping_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "KEPT_VERSIONS", 0)
    assert any(play(scenario(seed)).violations for seed in range(5))


def test_deciding_keys_without_slots_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SLOTS_MOST", 1)
    assert any(play(scenario(seed)).violations for seed in range(23, 30))
