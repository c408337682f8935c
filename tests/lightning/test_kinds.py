"""A node of one process takes the trainer's device, and sends those with several to the strategy for them."""

import pytest
import torch

from gradientmail_core.errors import ConfigurationError
from tests.lightning.nodes import QUIET


def test_the_trainers_device_is_taken_over(pl):
    trainer = pl.pl.Trainer(strategy=pl.Strategy(), **QUIET)
    assert trainer.strategy.root_device == torch.device("cpu")
    trainer.strategy.parallel_devices = [torch.device("meta")]
    assert trainer.strategy.root_device == torch.device("meta")


def test_several_devices_are_sent_to_the_strategy_for_them(pl):
    with pytest.raises(ConfigurationError, match=r"one device, and the trainer has 2.*GradientMailDDPStrategy"):
        pl.pl.Trainer(strategy=pl.Strategy(), **{**QUIET, "devices": 2})
