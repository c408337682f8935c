"""Random runs with every fault, a slice of the long search; and the seeds that once found a defect."""

import pytest

from gradientmail_core.sim.swarm import play, scenario

FOUND = {
    16: "a resumed closer waited for ever for outer state that its successors had swept",
    24: "two nodes held their only place in flight on different rounds, each waiting for the other's report",
    187: "a node that took a round over did not notice that another had committed it",
}


@pytest.mark.parametrize("seed", FOUND)
def test_seed_that_found_a_defect(seed: int) -> None:
    assert play(scenario(seed)).violations == (), FOUND[seed]


@pytest.mark.parametrize("seed", range(1000, 1015))
def test_seed(seed: int) -> None:
    verdict = play(scenario(seed))
    assert verdict.violations == ()
    assert verdict.rounds > 0
