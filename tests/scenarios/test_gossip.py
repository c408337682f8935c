"""Gossip runs whole: equal to DiLoCo where they must be, within their bound, and alive when processes die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.gossip import FactoredGossip
from gradientmail_core.algorithms.merge import WeightedMean
from gradientmail_core.algorithms.mixing import All, Nothing, Pair, Peers, contraction
from gradientmail_core.algorithms.outer import SGD, HeavyBall, Nesterov
from gradientmail_core.engine.gossip_learner import Answer, GossipLearner, Mixed, Rejoin
from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.sim.gossip import Bowl, SimulatedGossip
from gradientmail_core.sim.loop import VirtualClock, run_virtually
from gradientmail_core.sim.store import SimulatedStore
from gradientmail_core.sim.world import SimulatedNode

SCRIPT = Path(__file__).with_name("gossip_node.py")
PATIENCE = 60.0
ROUNDS = 10


def played(kind, settings, nodes=4):
    """The parameters of every node after ten rounds of ten steps on the production engine."""

    async def main(loop):
        mailbox, made = MemoryMailbox("run"), []
        for number in range(nodes):
            clock = VirtualClock(loop)
            store = SimulatedStore(mailbox, clock, number)
            options = {"steps": 10 * ROUNDS, "min_nodes": nodes, "model": Bowl()}
            made.append(kind(f"n{number}", store, settings, clock, number, **options).launch())
        await asyncio.gather(*(node.task for node in made))
        return [node.model.flat() for node in made]

    return run_virtually(main)


@pytest.mark.parametrize("fragments", [1, 3])
def test_mixing_everything_is_diloco(fragments):
    gossip = FactoredGossip(
        sync_every=10, fragments=fragments, mix2=All(), follow=False, delta_codec="F32", mean_codec="F32"
    )
    ours = played(SimulatedGossip, gossip)
    diloco = DiLoCo(
        sync_every=10,
        fragments=1,
        overlap_steps=0,
        follow=False,
        quorum_size=4,
        merge=WeightedMean(),
        outer=gossip.outer,
        delta_codec="F32",
    )
    theirs = played(SimulatedNode, diloco)[0]
    assert np.ptp(theirs) > 1e-3
    for parameters in ours:
        assert np.abs(parameters - theirs).max() <= 4 * np.spacing(np.abs(theirs)).max()


ETA, SIGMA, STEPS, NODES = 0.05, 1.0, 20, 8


def steady_disagreement(mix1, mix2, rounds=40, first=12):
    """The nodes' mean squared distance from their mean, a parameter, at the ends of inner phases, with outer SGD(1)."""
    return float(np.mean(disagreements(mix1, mix2, rounds, SGD(1.0), 0.05, at_starts=False)[first:]))


def disagreements(mix1, mix2, rounds, outer, curvature, at_starts):
    """The nodes' mean squared distance from their mean, a parameter, at the ends or starts of inner phases."""
    from gradientmail_core.algorithms.mixing import matrix

    settings = FactoredGossip(sync_every=STEPS, fragments=1, mix1=mix1, mix2=All(), outer=outer, follow=False)
    models = [Bowl(rate=ETA, curvature=curvature, sigma=SIGMA, elements=64) for _ in range(NODES)]
    layout = settings.partition.layouts(models[0].schema, 1)[0]
    begun, ended = [None] * NODES, [None] * NODES
    learners = [
        GossipLearner(
            model,
            (layout,),
            settings,
            Rejoin(0, (np.zeros(layout.size, np.float32),)),
            begin=lambda value, number=number: begun.__setitem__(number, value),
            exchange=lambda value, number=number: ended.__setitem__(number, value),
            applied=lambda moved: None,
        )
        for number, model in enumerate(models)
    ]
    noises, names, apart = [np.random.default_rng(n) for n in range(NODES)], [f"n{n}" for n in range(NODES)], []
    for learner in learners:
        learner.launch()
    for round in range(rounds):
        own = np.stack([value.vectors[0] for value in begun])
        starts = matrix(mix1, names, f"{round:x}", 0) @ own
        for learner, model, noise in zip(learners, models, noises, strict=True):
            for _ in range(STEPS):
                model.train(noise)
                learner.step(1)
        flats = own if at_starts else np.stack([model.flat() for model in models])
        apart.append(float(((flats - flats.mean(0)) ** 2).mean()))
        gradients = matrix(mix2, names, f"{round:x}", 1) @ np.stack([value.gradients[0] for value in ended])
        for number, learner in enumerate(learners):
            learner.deliver(Mixed(round, 0, starts[number].astype(np.float32)))
            learner.deliver(Answer(round, (gradients[number].astype(np.float32),), (), 0.0))
            learner.align()
    return apart


@pytest.mark.parametrize("mix1", [All(), Peers(2), Pair()])
@pytest.mark.parametrize("mix2", [Nothing(), Pair(), Peers(2), All()])
def test_disagreement_stays_within_the_published_bound(mix1, mix2):
    rho1, rho2 = contraction(mix1, NODES), contraction(mix2, NODES)
    bound = 2 * ETA**2 * SIGMA**2 * STEPS * (1 + rho2 / (1 - rho1))
    measured = steady_disagreement(mix1, mix2)
    assert 0.2 * bound < measured <= bound


def test_without_mix1_disagreement_adds_up_unless_gradients_are_all_mixed():
    bound = 2 * ETA**2 * SIGMA**2 * STEPS
    assert steady_disagreement(Nothing(), All()) <= bound
    assert steady_disagreement(Nothing(), Pair(), 90, 75) > 2 * steady_disagreement(Pair(), Pair(), 40)


STEEP = 5.0
"""A round closes 99.7 % of the distance to the optimum."""


def test_nesterov_of_a_nodes_own_swings_ever_further_where_the_loss_is_steep_and_heavy_ball_does_not():
    def apart(outer, mix2):
        return disagreements(All(), mix2, 120, outer, STEEP, at_starts=True)

    inner_noise = ETA**2 * SIGMA**2 / (1 - (1 - ETA * STEEP) ** 2)
    nesterov = apart(Nesterov(0.7, 0.9, warmup=0.0), Nothing())
    assert np.mean(nesterov[100:]) > 10 * np.mean(nesterov[20:40])
    assert np.mean(apart(HeavyBall(1.0, 0.9, warmup=0.0), Nothing())[20:]) < 1.3 * inner_noise
    assert np.mean(apart(Nesterov(0.6, 0.9, warmup=0.0), Nothing())[100:]) < 10 * inner_noise
    assert max(apart(Nesterov(0.7, 0.9, warmup=0.0), All())) < 1e-12


class Fleet:
    """Node processes around one directory."""

    def __init__(self, directory):
        self.directory, self.processes = directory, {}

    def start(self, name, steps):
        command = [sys.executable, str(SCRIPT), name, str(self.directory), str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def wait_for_round(self, round):
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if list(self.directory.glob(f"live/gossip/*{round:04d}/mix1-*")):
                return
            time.sleep(0.05)
        raise AssertionError(f"no mean of round {round} after {PATIENCE} s")

    def result(self, name):
        output, _ = self.processes[name].communicate(timeout=PATIENCE)
        assert self.processes[name].returncode == 0, output
        return json.loads(output.strip().splitlines()[-1])


def test_a_process_killed_with_sigkill_holds_nobody_up_and_a_late_one_joins(tmp_path):
    fleet = Fleet(tmp_path / "run")
    try:
        for name in ("a", "b", "victim"):
            fleet.start(name, 250)
        fleet.wait_for_round(3)
        fleet.processes["victim"].send_signal(signal.SIGKILL)
        fleet.start("late", 100)
        results = {name: fleet.result(name) for name in ("a", "b", "late")}
    finally:
        for process in fleet.processes.values():
            process.kill()
            process.wait()
    assert results["a"]["rounds"] >= 10 and all(result["apart"] < 0.3 for result in results.values())
    assert "late" in results["a"]["partners"] + results["b"]["partners"]
