"""The table and the JSON hold what was measured."""

import json

import pytest

from gradientmail_lightning.demo.report import Setup, as_json, as_table
from gradientmail_lightning.demo.settings import Settings
from tests.lightning.demo.outcomes import RESULTS

SETUP = Setup(Settings(steps=100), nodes=2, parameters=12345, mailbox="file:///tmp/run")


def test_json_has_the_means_and_every_seed() -> None:
    figures = json.loads(json.dumps(as_json(SETUP, RESULTS)))
    assert figures["single_loss"] == pytest.approx(2.6) and figures["merged_loss"] == pytest.approx(2.1)
    assert [row["merged_loss"] for row in figures["per_seed"]] == [2.0, 2.2]
    assert figures["kills"][0]["pid"] == 102 and figures["joins"][0]["node"] == "c"
    assert figures["outer"]["warmup"] == 10.0


def test_table_shows_difference_outer_setting_and_events() -> None:
    table = as_table(SETUP, RESULTS)
    assert "-0.500" in table and "mean" in table
    assert "momentum min(0.9, k/(k + 10))" in table
    assert "kill     b (pid 102) at step 60" in table
    assert max(map(len, table.splitlines())) <= 120
