"""Settings of gossip runs, and what Mix2 takes of a model."""

import json
from dataclasses import replace

import pytest

from gradientmail_core.algorithms.gossip import (
    SENSITIVE,
    FactoredGossip,
    Strengthen,
    gossip_from,
    selected,
    selection,
    with_state,
)
from gradientmail_core.algorithms.mixing import All, Nothing, Peers
from gradientmail_core.algorithms.outer import SGD, HeavyBall, Nesterov
from gradientmail_core.algorithms.partition import ByBytes
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.schema import FragmentLayout, Piece, Schema, TensorSpec

SCHEMA = Schema.of(
    [
        TensorSpec("embed.weight", (10, 4), "embedding"),
        TensorSpec("head.weight", (10, 4), "head"),
        *(TensorSpec(f"blocks.{number}.weight", (4, 4)) for number in (3, 5, 7, 9)),
    ]
)


@pytest.mark.parametrize(
    "settings",
    [
        FactoredGossip(),
        FactoredGossip.global_m1(50),
        FactoredGossip.global_m1_local_m2(50, fragments=2),
        FactoredGossip.local_m1_local_m2(rounds=3),
        FactoredGossip.noloco(),
        FactoredGossip(mix1=Peers(3), mix2=All(), outer=SGD(0.5), strengthen=Strengthen(0.1, "l2"), timeout=1.5),
    ],
)
def test_settings_come_back_from_the_manifest(settings):
    assert gossip_from(json.loads(json.dumps(settings.shared_settings()))) == settings


@pytest.mark.parametrize(
    "change",
    [
        {"sync_every": 0},
        {"fragments": 1000},
        {"mix1": "All"},
        {"mix2": All},
        {"timeout": 0.0},
        {"timeout": float("inf")},
        {"rounds": 10},
        {"pull": "both"},
        {"delta_codec": "F3"},
        {"mean_every": True},
        {"global_batch_size": 0},
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(change):
    with pytest.raises(ConfigurationError):
        replace(FactoredGossip(), **change)


@pytest.mark.parametrize(
    "change",
    [{"name": "diloco"}, {"mix1": None}, {"outer": {"name": "Newton"}}, {"colour": 1}, {"sync_every": "9"}],
)
def test_strange_manifests_are_refused(change):
    with pytest.raises(ConfigurationError):
        gossip_from({**FactoredGossip().shared_settings(), **change})


@pytest.mark.parametrize("threshold", [-1.0, float("nan")])
def test_a_threshold_is_a_number_from_zero(threshold):
    with pytest.raises(ConfigurationError):
        Strengthen(threshold)


def test_presets_are_what_their_papers_call_so():
    assert FactoredGossip.global_m1().mix2 == Nothing() and not FactoredGossip.global_m1().blocking
    local = FactoredGossip.global_m1_local_m2()
    assert (local.mix1, local.mix2, local.mix2_on, local.blocking) == (All(), Peers(3), SENSITIVE, True)
    assert (FactoredGossip.global_m1().outer, local.outer) == (HeavyBall(1.0, 0.9, 3.0), Nesterov(0.7, 0.9, 3.0))
    noloco = FactoredGossip.noloco()
    assert (noloco.sync_every, noloco.outer, noloco.pull) == (50, HeavyBall(0.7, 0.5, 0.0), "gradient")


def test_sensitive_tensors_are_embedding_head_and_the_two_shallowest_blocks():
    assert selected(SCHEMA, SENSITIVE) == {"embed.weight", "head.weight", "blocks.3.weight", "blocks.5.weight"}
    assert selected(SCHEMA, ()) == {tensor.name for tensor in SCHEMA.tensors}
    assert selected(SCHEMA, ("blocks.*", "@head")) >= {"blocks.9.weight", "head.weight"}


@pytest.mark.parametrize("pattern", ["decoder.*", "@blocks:two"])
def test_a_pattern_that_fits_nothing_is_an_error(pattern):
    with pytest.raises(ConfigurationError, match="mix2_on"):
        selected(SCHEMA, (pattern,))


def test_a_selection_covers_its_tensors_once_over_all_fragments():
    names = selected(SCHEMA, SENSITIVE)
    taken = 0
    for layout in ByBytes().layouts(SCHEMA, 3):
        chosen = selection(layout, names)
        if chosen is not None:
            assert chosen.layout.size == sum(stop - start for start, stop in chosen.spans)
            assert chosen.layout.pieces[0].offset == 0
            taken += chosen.layout.size
    assert taken == 40 + 40 + 16 + 16


def test_a_fragment_without_chosen_tensors_has_no_selection():
    assert selection(FragmentLayout(0, (Piece("a", (3,), 0),)), frozenset({"b"})) is None


def test_a_layout_with_state_holds_every_piece_again():
    layout = FragmentLayout(1, (Piece("a", (2, 3), 0), Piece("b", (4,), 6)))
    wire = with_state(layout, ("momentum",))
    assert wire.size == 20 and [piece.name for piece in wire.pieces] == ["a", "b", "momentum/a", "momentum/b"]
    assert [piece.offset for piece in wire.pieces] == [0, 6, 10, 16]
    assert with_state(layout, ()) == layout
