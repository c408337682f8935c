"""Planning: sizes as models have them, costs at list prices, and the setting that keeps most of the work."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gradientmail_core.sim.planning import (
    Question,
    answer,
    closing_seconds,
    costs,
    fleet_of,
    longer_cycle,
    parameters_of,
    preset,
    recommended,
)
from gradientmail_core.sim.store import Traffic

WIDE = Question(parameters=10_000_000, nodes=2, bandwidth=1e9, step_seconds=0.2)

LLAMA = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
MIXTRAL = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(("config", "published"), [(LLAMA, 1.236e9), (GPT2, 124.4e6), (MIXTRAL, 46.7e9)])
def test_a_configuration_gives_the_models_size(config, published, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert parameters_of(path) == pytest.approx(published, rel=0.01)


def test_payloads_weigh_what_their_codec_makes_of_the_parameters() -> None:
    def bits(name: str, **settings: object) -> float:
        fleet = fleet_of(
            preset(name, **settings), nodes=2, parameters=1 << 20, bandwidth=1e6, latency=0.01, step_seconds=1.0,
            seconds=1.0,
        )  # fmt: skip
        return 8 * fleet.delta_bytes * fleet.settings.fragments / (1 << 20)

    assert bits("decoupled") == 16 and bits("local_sgd") == 32
    assert bits("streaming") == pytest.approx(4, abs=0.6) and bits("sparse") < 0.5
    assert bits("decoupled", delta_codec="INT4", fragments=None) == pytest.approx(4, abs=0.6)


def test_requests_cost_by_kind_and_downloads_by_byte() -> None:
    price = costs(Traffic(gets=1_000_000, puts=100_000, lists=100_000, deletes=10**9, bytes_down=10**12))
    assert price.dollars == pytest.approx(0.4 + 1.0) and price.egress_dollars == pytest.approx(90.0)


def test_a_wide_line_leaves_training_alone_and_a_narrow_one_does_not() -> None:
    wide = answer(WIDE, "local_sgd")
    narrow = answer(replace(WIDE, bandwidth=1e6), "local_sgd")
    assert wide.outcome.utilization > 0.8 > 0.5 > narrow.outcome.utilization
    assert longer_cycle(wide, WIDE) is None
    longer = longer_cycle(narrow, replace(WIDE, bandwidth=1e6))
    assert longer is not None and longer > narrow.settings.sync_every
    best, why = recommended([wide, narrow])
    assert best is wide and "of node time" in why


def test_closers_share_the_downloads() -> None:
    def seconds(fragments: int, nodes: int) -> float:
        settings = preset("decoupled", fragments=fragments)
        fleet = fleet_of(
            settings, nodes=nodes, parameters=10**6, bandwidth=1e6, latency=0.01, step_seconds=1.0, seconds=1.0
        )
        return closing_seconds(fleet)

    assert seconds(8, 8) < seconds(1, 8) / 2
    assert seconds(1, 16) > seconds(1, 8)


def test_failures_cost_time() -> None:
    steady, failing = answer(WIDE, "decoupled"), answer(replace(WIDE, mtbf=60.0, down=20.0), "decoupled")
    assert failing.outcome.goodput < steady.outcome.goodput - 0.1
