"""Shares and means through the mailbox."""

from dataclasses import replace

import numpy as np
import pytest

from gradientmail_core.engine.gossip_shares import (
    MEANS_KEPT,
    Means,
    MeanValues,
    Vector,
    encoded_full,
    encoded_mean,
    encoded_share,
    mean_values,
    opened_share,
    read_share,
)
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.gossip import MeanKey, MeanRecord, ShareKey
from tests.core.engine.gossip_parts import EXACT, virtually

ROUGH = replace(EXACT, delta_codec="INT4", mean_codec="BF16")


def values_of(vector, size):
    out = np.empty(size, np.float32)
    vector.decode(0, size, out)
    return out


def start_of(here, fill, base="newest", **changes):
    wire = here.run.wires[0]
    key = ShareKey(**{"round": 3, "kind": "start", "fragment": 0, "node": here.host.node, **changes})
    mean = here.means.newest(0) if base == "newest" else base
    values = np.asarray(np.broadcast_to(np.float32(fill), (wire.size,)))
    return key, encoded_share(here.host, here.run, key, wire, values, mean, (20, 160))


def test_a_start_is_a_difference_to_a_mean_and_comes_back_with_its_tokens():
    async def main(place):
        here, there = await place.surroundings("a"), await place.surroundings("b")
        key, body = start_of(here, 2.5)
        await place.mailbox.put(key.path, body)
        return await read_share(there.host, there.run, there.means, key, there.run.wires[0], here.host.incarnation)

    vector = virtually(main)
    assert isinstance(vector, Vector) and vector.tokens == 160
    assert (values_of(vector, 64) == 2.5).all()


def test_coarse_codecs_round_the_step_and_not_the_parameters():
    async def main(place):
        here = await place.surroundings("a", ROUGH)
        wire = here.run.wires[0]
        step = np.linspace(-1e-3, 1e-3, wire.size, dtype=np.float32)
        key, body = start_of(here, 2.0 + step)
        return step, opened_share(here.run, here.means, key, wire, here.host.incarnation, body)

    step, vector = virtually(main)
    assert np.abs(values_of(vector, step.size) - 2.0 - step).max() < 2e-4


def test_merged_buffers_stay_exact_in_starts_and_means():
    async def main(place):
        here = await place.surroundings("a", replace(ROUGH, mean_codec="INT4"))
        wire = here.run.wires[0]
        pieces = (replace(wire.pieces[0], role="buffer"), *wire.pieces[1:])
        here = replace(here, run=replace(here.run, wires=(replace(wire, pieces=pieces), *here.run.wires[1:])))
        wire, count = here.run.wires[0], pieces[0].elements
        exact = np.linspace(0.1, 300.0, wire.size, dtype=np.float32)
        key, body = start_of(here, exact)
        vector = opened_share(here.run, here.means, key, wire, here.host.incarnation, body)
        made = encoded_mean(here.host, here.run, 3, 0, exact.copy(), here.means.newest(0), 160)
        for values in (values_of(vector, wire.size), made.mean.values):
            assert values[:count] == pytest.approx(exact[:count], rel=1e-6)
            assert not np.allclose(values[count:], exact[count:], rtol=1e-3)

    virtually(main)


def test_a_base_that_is_not_here_is_fetched():
    async def main(place):
        here, there = await place.surroundings("a"), await place.surroundings("b")
        made = encoded_mean(here.host, here.run, 2, 0, np.full(64, 7.0, np.float32), here.means.newest(0), 9)
        await place.mailbox.put(made.full.key, made.full_body)
        await place.mailbox.create(MeanKey(2, 0, full=True).path, record_of(here, made, full=True).encoded())
        key, body = start_of(here, 7.5, made.mean)
        await place.mailbox.put(key.path, body)
        wire = there.run.wires[0]
        vector = await read_share(there.host, there.run, there.means, key, wire, None)
        lost = await read_share(there.host, there.run, Means(), replace(key, round=9), wire, None)
        return vector, lost, there.means.newest(0).round

    vector, lost, newest = virtually(main)
    assert (values_of(vector, 64) == 7.5).all() and newest == 2 and lost is None


def test_a_base_that_nobody_has_is_refused():
    async def main(place):
        here, there = await place.surroundings("a"), await place.surroundings("b")
        key, body = start_of(here, 7.5, MeanValues(0, 2, "9" * 64, np.zeros(64, np.float32)))
        await place.mailbox.put(key.path, body)
        return await read_share(there.host, there.run, there.means, key, there.run.wires[0], None)

    assert isinstance(virtually(main), Rejected)


def record_of(here, made, full=False):
    base, payload = (None, made.full) if full else (here.means.newest(0).name, made.change)
    name, tokens = made.mean.name, made.mean.tokens
    return MeanRecord(here.run.id, made.mean.round, 0, "a", "0f", ("a",), name, payload, base, 0.0, tokens)


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf])
def test_a_share_that_is_not_finite_is_refused(fill):
    async def main(place):
        here = await place.surroundings("a")
        key, body = start_of(here, fill)
        return opened_share(here.run, here.means, key, here.run.wires[0], here.host.incarnation, body)

    assert isinstance(virtually(main), Rejected)


def test_another_process_and_a_damaged_body_are_refused():
    async def main(place):
        here = await place.surroundings("a")
        key, body = start_of(here, 2.5)
        wire, damaged = here.run.wires[0], bytearray(body)
        damaged[-3] ^= 1
        return [
            opened_share(here.run, here.means, key, wire, "0b" * 8, body),
            opened_share(here.run, here.means, key, wire, None, damaged),
            opened_share(here.run, here.means, key, wire, None, body[:-4]),
            opened_share(here.run, here.means, key, wire, None, b"garbage"),
            opened_share(here.run, here.means, replace(key, kind="grad"), wire, None, body),
        ]

    assert all(isinstance(outcome, Rejected) for outcome in virtually(main))


def test_a_codec_that_is_not_the_runs_is_refused():
    async def main(place):
        here, other = await place.surroundings("a"), await place.surroundings("b", ROUGH)
        key, body = start_of(here, 2.5)
        return opened_share(other.run, here.means, key, here.run.wires[0], None, body)

    assert isinstance(virtually(main), Rejected)


def test_a_mean_says_the_same_in_full_and_as_a_change():
    async def main(place):
        here = await place.surroundings("a", ROUGH)
        exact = (2.0 + np.random.default_rng(0).standard_normal(64) * 1e-2).astype(np.float32)
        made = encoded_mean(here.host, here.run, 2, 0, exact.copy(), here.means.newest(0), 9)
        await place.mailbox.put(made.change.key, made.change_body)
        await place.mailbox.put(made.full.key, made.full_body)
        change, full = record_of(here, made), record_of(here, made, full=True)
        held = await mean_values(here.host, here.run, here.means, change)
        fresh = await mean_values(here.host, here.run, Means(), full)
        strange = await mean_values(here.host, here.run, Means(), change)
        await place.mailbox.delete(full.payload.key)
        lost = await mean_values(here.host, here.run, Means(), full)
        return exact, held, fresh, encoded_full(here.host, here.run, held)[0], made, strange, lost

    exact, held, fresh, again, made, strange, lost = virtually(main)
    assert held.values.tobytes() == fresh.values.tobytes() == made.mean.values.tobytes()
    assert held.name == fresh.name == made.mean.name == made.full.sha256 and again == made.full
    assert held.tokens == 9 and 0 < np.abs(held.values - exact).max() < 1e-3
    assert isinstance(strange, Rejected) and isinstance(lost, Rejected)


def test_few_means_are_held_and_the_newest_is_known():
    means = Means()
    for round in (5, 3, 9, 7):
        means.keep(MeanValues(0, round, f"{round}", np.zeros(1, np.float32)))
    assert means.newest(0).round == 9 and means.newest(1) is None
    assert [round for round in (3, 5, 7, 9) if means.named(0, f"{round}")] == [5, 7, 9][-MEANS_KEPT:]
