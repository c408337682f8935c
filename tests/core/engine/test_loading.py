"""A version is the same bytes whether it came whole, from the version before, or from an older one and its changes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.algorithms.outer import SGD, Nesterov
from gradientmail_core.engine.chain import Head, succeeded
from gradientmail_core.engine.closing import Merger, OuterState, outer_layout, put_sections, stored
from gradientmail_core.engine.joining import load_heads
from gradientmail_core.engine.loading import Held, Source, changed, made_by, named, parameters, same_parameters
from gradientmail_core.engine.run import Board, Run
from gradientmail_core.engine.sweeping import Sweeper
from gradientmail_core.mailbox import MeteredMailbox
from gradientmail_core.protocol.exchange import commit_round, encode_section
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.records import Section
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.model import Flat
from tests.core.engine.parts import SETTINGS, Place, created, first_head, record_after, run_of, virtually

CHANGES = replace(SETTINGS, commit_codec="INT8", full_every=3, outer=SGD())


class Chain:
    """Fragment 0 of a run whose commits are computed and written as a closer does, by hand."""

    def __init__(self, place: Place, run: Run) -> None:
        self.place, self.run, self.host = place, run, place.host("a")
        self.head, self.state = first_head(run), OuterState(())
        self.metered = MeteredMailbox(place.mailbox)
        self.source = Source(self.metered, self.host.clock, run.manifest, run.layouts[0])
        self.heads: list[Head] = [self.head]
        self.thetas: list[Flat] = [np.zeros(run.layouts[0].size, np.float32)]
        self.noise = np.random.default_rng(1)

    async def commit(self, *, void: bool = False) -> None:
        record = record_after(self.head, self.run, nodes=() if void else ("a",), sections=self.head.sections)
        theta = self.thetas[-1]
        if not void:
            master = theta + self.noise.standard_normal(theta.size).astype(np.float32)
            result = stored(self.run.settings, theta, master, (), None)
            theta = result.theta
            record = replace(record, sections=await self.put(result))
        decided = await commit_round(self.place.mailbox, self.host.clock, record)
        self.head = succeeded(self.head, decided, self.run.fragments, self.host.clock.now())
        self.heads.append(self.head)
        self.thetas.append(theta)

    async def put(self, result: Merger) -> tuple[Section, ...]:
        return await put_sections(self.host, self.run, self.head, result, outer_layout(self.run.layouts[0], ()))

    def held(self, version: int) -> Held:
        return Held(version, self.heads[version].sections, self.thetas[version])

    async def load(self, version: int, held: int | None = None) -> Flat | Rejected:
        return await parameters(
            self.source, version, self.heads[version].sections, None if held is None else self.held(held)
        )

    async def keys(self, version: int, name: str) -> str:
        section = named(self.heads[version].sections, name)
        assert section is not None
        return section.key


def chained(main: Any, settings: DiLoCo = CHANGES, commits: str = "cccccccc") -> None:
    """Run ``main`` on a chain of commits: ``c`` for one, ``v`` for a void round."""

    async def placed(place: Place) -> None:
        chain = Chain(place, await created(place.host(), settings))
        for kind in commits:
            await chain.commit(void=kind == "v")
        await main(chain)

    virtually(placed)


@pytest.mark.parametrize("master", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("codec", [None, "F32", "BF16", "INT4", "TOPK(64/4096,INT2)"])
def test_every_way_to_a_version_gives_its_bytes(codec: str | None, master: str) -> None:
    async def main(chain: Chain) -> None:
        for version in range(1, len(chain.heads)):
            committed = chain.thetas[version].tobytes()
            for held in (None, *range(version + 1)):
                found = await chain.load(version, held)
                assert not isinstance(found, Rejected), (version, held, found)
                assert found.tobytes() == committed, (version, held)

    every = 1 if codec is None else 3
    settings = replace(CHANGES, commit_codec=codec, full_every=every, master_dtype=master)  # type: ignore[arg-type]  # names of settings, as given
    chained(main, settings, "ccvcccvvccc")


def test_only_every_nth_version_is_whole() -> None:
    async def main(chain: Chain) -> None:
        whole = [version for version, head in enumerate(chain.heads) if named(head.sections, "theta")]
        assert whole == [0, 3, 6]
        assert all(named(head.sections, "change") for head in chain.heads[1:])
        assert (chain.thetas[4] != chain.thetas[3]).all()

    chained(main)


def test_with_changes_every_version_can_be_whole() -> None:
    async def main(chain: Chain) -> None:
        assert all({"theta", "change"} <= {one.name for one in head.sections} for head in chain.heads[1:])

    chained(main, replace(CHANGES, full_every=1), "cc")


def test_who_holds_the_version_before_downloads_the_change_only() -> None:
    async def main(chain: Chain) -> None:
        before = chain.metered.usage.bytes_down
        await chain.load(6, 5)
        small = chain.metered.usage.bytes_down - before
        await chain.load(6)
        assert small < 0.75 * (chain.metered.usage.bytes_down - before - small)

    chained(main)


def test_what_does_not_match_its_digest_falls_back_to_the_whole() -> None:
    async def main(chain: Chain) -> None:
        wrong = replace(chain.held(5), theta=chain.thetas[5] + np.float32(0.5))
        found = await parameters(chain.source, 6, chain.heads[6].sections, wrong)
        assert not isinstance(found, Rejected) and found.tobytes() == chain.thetas[6].tobytes()
        found = await parameters(chain.source, 7, chain.heads[7].sections, replace(wrong, version=6))
        assert not isinstance(found, Rejected) and found.tobytes() == chain.thetas[7].tobytes()

    chained(main)


@pytest.mark.parametrize("what", ["change", "theta", "record"])
def test_what_cannot_be_rebuilt_is_a_reason_and_not_an_exception(what: str) -> None:
    async def main(chain: Chain) -> None:
        if what == "record":
            await chain.place.mailbox.delete("tape/000000/0000000014-0")
        else:
            await chain.place.mailbox.delete(await chain.keys(6 if what == "theta" else 7, what))
        assert isinstance(await chain.load(8), Rejected)
        assert not isinstance(await chain.load(5), Rejected)

    chained(main)


def test_a_change_that_makes_something_else_is_refused() -> None:
    async def main(chain: Chain) -> None:
        change = named(chain.heads[8].sections, "change")
        assert change is not None
        forged = tuple(replace(one, makes="0" * 64) if one == change else one for one in chain.heads[8].sections)
        assert isinstance(await parameters(chain.source, 8, forged), Rejected)
        assert isinstance(await parameters(chain.source, 8, ()), Rejected)

    chained(main)


def test_a_joiner_loads_a_whole_version_and_the_changes_since() -> None:
    async def main(chain: Chain) -> None:
        commits = await load_heads(chain.host, chain.run, {})
        assert commits[0].head.version == 8 and commits[0].theta.tobytes() == chain.thetas[8].tobytes()

    chained(main)


def test_sweeping_leaves_the_two_newest_versions_within_reach() -> None:
    async def main(chain: Chain) -> None:
        board = Board(chain.host)
        board.listed([])
        board.open_rounds.update({fragment: chain.run.fragments + fragment for fragment in range(chain.run.fragments)})
        sweeper = Sweeper(chain.host, chain.run, board)
        kept = []
        for _ in range(14):
            await chain.commit()
            sweeper.saw(chain.head)
            await sweeper.committed(chain.head, [])
            newest = chain.head.version
            for version in {newest, max(newest - 1, 0)}:
                found = await chain.load(version)
                assert not isinstance(found, Rejected) and found.tobytes() == chain.thetas[version].tobytes()
            kept.append(len(chain.place.listed("blobs/")) - chain.run.fragments)
        assert max(kept) <= 3 + 3 + 2 + 2 and kept[-1] == kept[-4], "it does not grow"

    chained(main, commits="")


def test_digests_are_those_of_the_payloads() -> None:
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    for name in ("F32", "BF16", "F16"):
        _, data = encode_section("theta", run_of(CHANGES).layouts[0], codec_named(name), values)
        assert made_by(values, codec_named(name)) == data


def test_void_rounds_have_the_parameters_of_the_version_before() -> None:
    theta = Section("theta", "a", "0" * 64, "F32")
    outer = Section("outer", "b", "1" * 64, "F32")
    assert same_parameters((theta, outer), (theta,)) and not same_parameters((theta,), ())


# -- formats -----------------------------------------------------------------------------------------------


def steps_of(settings: DiLoCo, count: int, delta: float, theta: float = 1.0) -> tuple[Flat, list[Flat]]:
    """The parameters after so many commits of a constant delta, and the outer state then."""
    values, state = np.full(64, theta, np.float32), OuterState(())
    names = settings.outer.state_names()
    state = OuterState(tuple(np.zeros(64, np.float32) for _ in names))
    for version in range(1, count + 1):
        master = values.copy() if state.residual is None else values + state.residual
        arrays = tuple(part.copy() for part in state.arrays)
        settings.outer.step(master, np.full(64, delta, np.float32), arrays, version)
        result = stored(settings, values, master, arrays, None)
        values, state = result.theta, result.outer
    return values, list(state.arrays)


@pytest.mark.parametrize(
    ("formats", "moves"),
    [
        ({}, True),
        ({"master_dtype": "BF16"}, True),
        ({"master_dtype": "BF16", "residual_dtype": "BF16"}, True),
        ({"master_dtype": "BF16", "residual_dtype": None}, False),
        ({"commit_codec": "INT2"}, True),
        ({"commit_codec": "TOPK(1024/4096,INT2)", "full_every": 4}, True),
        ({"commit_codec": "TOPK(1024/4096,INT2)", "residual_dtype": None}, False),
    ],
)
def test_what_rounding_leaves_out_is_kept_for_the_next_step(formats: dict[str, Any], moves: bool) -> None:
    settings = replace(SETTINGS, outer=SGD(), **formats)
    values, _ = steps_of(settings, 200, 1e-4)
    expected, _ = steps_of(replace(SETTINGS, outer=SGD()), 200, 1e-4)
    near = np.abs(values - expected) < 0.005
    assert near.all() == moves
    assert np.abs(expected - 0.98).max() < 1e-5


def test_momentum_goes_on_from_what_was_stored() -> None:
    settings = replace(SETTINGS, outer=Nesterov(warmup=0.0), momentum_dtype="BF16")
    exact, _ = steps_of(replace(settings, momentum_dtype="F32"), 20, 1e-3)
    coarse, _ = steps_of(settings, 20, 1e-3)
    np.testing.assert_allclose(coarse, exact, atol=1e-2)


def test_a_change_is_added_before_it_is_rounded() -> None:
    theta, change = np.full(4, 1.0, np.float32), np.full(4, 2.0**-9, np.float32)
    assert (changed(theta, change, codec_named("BF16")) == 1.0).all()
    assert (changed(theta, change, codec_named("F32")) == 1.0 + 2.0**-9).all()
