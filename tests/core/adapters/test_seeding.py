"""Seeds that no two nodes share."""

from gradientmail_core.adapters.seeding import node_seed


def test_seeds_differ_between_nodes_and_not_between_starts():
    seeds = {node_seed(f"node-{number}", 42) for number in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert node_seed("a", 42) == node_seed("a", 42) != node_seed("a", 43)
