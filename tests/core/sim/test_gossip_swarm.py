"""Random gossip runs: seeds with every fault hold the invariants, and the judge sees what breaks them."""

from dataclasses import replace

import numpy as np
import pytest

from gradientmail_core.engine import gossip_round, gossip_sweeping
from gradientmail_core.engine.gossip_round import GossipRound
from gradientmail_core.sim.gossip import Bowl
from gradientmail_core.sim.gossip_swarm import Fault, play, scenario

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_fault_stops_a_run_or_drives_its_mean_away(seed):
    verdict = play(scenario(seed))
    assert not verdict.violations and verdict.rounds > 5


def test_a_seed_is_one_run():
    assert scenario(3) == scenario(3) != scenario(4)
    assert play(scenario(3)) == play(scenario(3))


def quiet(seed=5):
    """A scenario of three nodes without faults."""
    script = scenario(seed)
    settings = replace(script.settings, rounds=1, timeout=0.5, fragments=2)
    return replace(script, settings=settings, speeds=(0.1,) * 3, joins=(0.0,) * 3, drifts=(1.0,) * 3, faults=())


def test_a_wait_that_never_ends_is_seen(monkeypatch):
    async def never(self, ended):
        await self._host.clock.sleep(1e9)

    monkeypatch.setattr(GossipRound, "exchanged", never)
    script = quiet()
    script = replace(script, settings=replace(script.settings, mix2=gossip_round.All()))
    assert any("ended no round" in violation for violation in play(script).violations)


def test_a_mean_that_runs_away_is_seen(monkeypatch):
    monkeypatch.setattr(Bowl, "train", lambda self, noise: [np.add(v, 0.01, out=v) for v in self.values.values()])
    assert any("from the bottom" in violation for violation in play(quiet()).violations)


def test_a_payload_swept_too_early_is_seen(monkeypatch):
    monkeypatch.setattr(gossip_sweeping, "ROUNDS_KEPT", -3)
    monkeypatch.setattr(gossip_sweeping, "payload_number", lambda round, fragment, fragments: 10**9)
    script = quiet()
    script = replace(script, faults=(Fault("kill", 20.0, 1, None),))
    assert any("misses a payload" in violation for violation in play(script).violations)
