"""Settings survive the command line that passes them to a node."""

import argparse

import pytest

from gradientmail_core.errors import ConfigurationError
from gradientmail_lightning.demo.settings import Settings, add_settings, settings_from


def test_settings_survive_the_command_line() -> None:
    settings = Settings(steps=7, width=64, lr=3e-4)
    parser = argparse.ArgumentParser()
    add_settings(parser)
    assert settings_from(parser.parse_args(settings.arguments())) == settings


def test_every_round_waits_for_every_node() -> None:
    algorithm = Settings().algorithm(3)
    assert algorithm.quorum_size == 4 and algorithm.overlap_steps == 0 and algorithm.follow is False


def test_impossible_settings_are_explained() -> None:
    with pytest.raises(ConfigurationError, match="fragments"):
        Settings(sync_every=2, fragments=3).algorithm(2)
