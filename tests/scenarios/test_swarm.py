"""Random runs with every fault, a slice of the long search; and the schedules that once found a defect."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from gradientmail_core.algorithms.alignment import Adaptive, Carry
from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.merge import Median, TrimmedMean
from gradientmail_core.algorithms.outer import SGD
from gradientmail_core.sim.scenario import (
    Fault,
    Freeze,
    Hang,
    Junk,
    Kill,
    Outage,
    Partition,
    Scenario,
    Slow,
    scenario,
)
from gradientmail_core.sim.store import Weather
from gradientmail_core.sim.swarm import play


def schedule(
    settings: DiLoCo,
    weather: Weather,
    faults: tuple[Fault, ...],
    *,
    speeds: tuple[float, ...],
    seed: int,
    joins: tuple[float, ...] | None = None,
    drifts: tuple[float, ...] | None = None,
    lingers: bool = True,
) -> Scenario:
    """A scenario whose nodes are ordinary where nothing is said of them."""
    nodes = len(speeds)
    plain = (1.0,) * nodes
    return Scenario(
        seed, settings, speeds, joins or (0.0,) * nodes, drifts or plain, plain, weather, faults, lingers=lingers
    )


FOUND: Mapping[str, Scenario] = {
    "a resumed closer waited for ever for outer state that its successors had swept": schedule(
        DiLoCo(sync_every=12, fragments=4, in_flight=2, overlap_steps=3, quorum_size=2),
        Weather(latency=0.005, request_lost=0.0004, listing_lags=0.3),
        (
            Junk(1.51, "creation", 50),
            Junk(5.79, "creation", 1),
            Junk(17.39, "lease", 33),
            Outage(20.11, 10.0),
            Partition(25.61, 1, 20.0),
            Kill(26.08, 2, 0.5),
            Hang(38.76, 2, 4.0),
            Freeze(38.98, 0, 10.0),
            Partition(39.43, 1, 10.0),
        ),
        speeds=(0.5, 0.3, 0.2),
        drifts=(1.0100029038527387, 1.0271008698985342, 1.0061264762178548),
        seed=16,
    ),
    "two nodes held their only place in flight on different rounds, each waiting for the other's report": schedule(
        DiLoCo(sync_every=8, fragments=2, in_flight=1, quorum_size=3),
        Weather(latency=0.005, request_lost=0.019, answer_lost=0.095, listing_lags=0.3),
        (Kill(11.39, 2, 5.0), Kill(13.33, 0, None), Outage(20.28, 4.0), Partition(26.94, 1, 20.0)),
        speeds=(0.2, 0.3, 0.2, 0.5),
        joins=(0.0, 14.03, 0.0, 0.0),
        drifts=(1.0274896501710906, 1.014348974158711, 0.9966524380513366, 0.9882760588078613),
        seed=24,
    ),
    "a node that took a round over did not notice that another had committed it": schedule(
        DiLoCo(sync_every=20, fragments=4, in_flight=1, overlap_steps=10, quorum_size=3, grace_seconds=0.0),
        Weather(latency=0.05, bandwidth=1e6, answer_lost=0.012, write_late=0.03, listing_lags=0.3),
        (
            Kill(4.28, 0, 0.5),
            Outage(11.28, 10.0),
            Partition(15.39, 2, 10.0),
            Freeze(16.28, 2, 4.0),
            Outage(19.27, 20.0),
            Outage(33.56, 10.0),
            Freeze(37.81, 2, 20.0),
        ),
        speeds=(0.5, 0.5, 0.2),
        seed=187,
    ),
    "a probe that missed its object for once took the store for one that overwrites": schedule(
        DiLoCo(
            sync_every=4,
            fragments=4,
            in_flight=3,
            follow=False,
            quorum_size=2,
            outer=SGD(),
            merge=TrimmedMean(),
            alignment=Adaptive(),
            delta_codec="TOPK(64/4096,INT2)",
            error_feedback=1.0,
            master_dtype="BF16",
            momentum_dtype="F16",
            compression="auto",
            merge_memory=1000,
        ),
        Weather(
            latency=0.01,
            bandwidth=10000.0,
            request_lost=0.01982072255514965,
            answer_lost=0.09910361277574825,
            write_late=0.049551806387874126,
            throttled=0.049551806387874126,
            silent=0.009910361277574825,
            unfound=0.049551806387874126,
        ),
        (
            Junk(1.7702547552627121, "stray", 34),
            Kill(3.494183298005794, 1, 5.0),
            Kill(9.041026225195779, 1, 0.5),
            Outage(11.73774916376732, 4.0),
        ),
        speeds=(0.2, 0.2),
        seed=73,
        lingers=False,
    ),
    "a node cut off for long deleted the beat that it tried its store with": schedule(
        DiLoCo(
            sync_every=4,
            fragments=4,
            in_flight=3,
            overlap_steps=3,
            follow=False,
            quorum_size=2,
            grace_seconds=2.0,
            delta_codec="BF16",
            error_feedback=None,
            compression="auto",
            merge_memory=2**29,
        ),
        Weather(
            latency=0.05,
            bandwidth=10000.0,
            answer_lost=0.03155775261489168,
            undecided=0.03155775261489168,
            unfound=0.01577887630744584,
        ),
        (Partition(1.9225254441109194, 1, 16.0), Outage(19.69867361944313, 4.0)),
        speeds=(0.2, 0.2, 0.2),
        drifts=(1.013431453353176, 0.9705481455850916, 1.0189426737571083),
        seed=47,
        lingers=False,
    ),
    "a creator whose question took longer than the lease time-out gave up the manifest it had written": schedule(
        DiLoCo(
            sync_every=10,
            fragments=2,
            overlap_steps=10,
            follow=False,
            quorum_size=1,
            grace_seconds=0.0,
            outer=SGD(),
            merge=TrimmedMean(),
            stale="rebase",
            delta_codec="INT2",
            error_feedback=None,
            master_dtype="BF16",
            residual_dtype="BF16",
            compression="auto",
        ),
        Weather(
            latency=0.05,
            bandwidth=10000.0,
            request_lost=0.06943833593150421,
            answer_lost=0.01388766718630084,
            write_late=0.01388766718630084,
            silent=0.00694383359315042,
            unfound=0.034719167965752105,
        ),
        (),
        speeds=(0.2,),
        seed=273,
        lingers=False,
    ),
    "payloads kept back for a joiner stayed once another node closed their fragment": replace(
        schedule(
            DiLoCo(
                sync_every=4,
                fragments=3,
                in_flight=3,
                follow=False,
                quorum_size=1,
                grace_seconds=0.0,
                merge=Median(),
                alignment=Carry(),
                stale="rebase",
                delta_codec="BF16",
                error_feedback=1.0,
                commit_codec="INT4",
                full_every=2,
                momentum_dtype="BF16",
                compression="zstd",
            ),
            Weather(latency=0.2, bandwidth=10000.0, listing_lags=0.3),
            (Slow(15.967495104726103, 2, 8.0, 5.0), Hang(19.987813764854483, 0, 4.0)),
            speeds=(0.2, 0.2, 0.2),
            joins=(0.0, 13.190332357202248, 6.779626577344303),
            drifts=(0.986085760474959, 1.0120594284365374, 0.9911481926030428),
            seed=808,
            lingers=False,
        ),
        lines=(1.0, 1.0, 3.0),
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_schedule_that_found_a_defect(found: str) -> None:
    assert play(FOUND[found]).violations == (), found


@pytest.mark.parametrize("seed", [144, 221, 287, 408, 433, 670, 1182, 4775, 5600, 7072, 8336])
def test_seed_that_found_a_defect(seed: int) -> None:
    assert play(scenario(seed)).violations == ()


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_seed(seed: int) -> None:
    verdict = play(scenario(seed))
    assert verdict.violations == ()
    assert verdict.rounds > 0
