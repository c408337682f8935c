"""What was handed off by other optimizers than the program's is refused, before Lightning loads it."""

from typing import Any

import pytest
import torch

from gradientmail_core.errors import ConfigurationError
from tests.lightning.test_handing import train


def optimizing(pl: Any, *makers: Any) -> Any:
    """A module with these optimizers, stepped by hand where there are several."""

    def configure_optimizers(self: Any) -> Any:
        return [maker(self.parameters()) for maker in makers]

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch[0]))
            optimizer.step()

    module = pl.Module(configure_optimizers=configure_optimizers, training_step=training_step)
    module.automatic_optimization = False
    return module


def in_groups(parameters: Any) -> Any:
    return torch.optim.Adam([{"params": [parameter]} for parameter in parameters])


@pytest.mark.parametrize(
    ("makers", "words"),
    [
        ([torch.optim.SGD], "optimizer: Adam there, SGD here"),
        ([in_groups], "parameter groups"),
        ([torch.optim.Adam, torch.optim.Adam], "how many optimizers there are: 1 there, 2 here"),
    ],
)
def test_what_other_optimizers_handed_off_is_refused(lightning, tmp_path, makers, words):
    train(lightning, tmp_path, optimizing(lightning, torch.optim.Adam), trainer={"max_epochs": 1})
    with pytest.raises(ConfigurationError, match=words):
        train(lightning, tmp_path, optimizing(lightning, *makers), trainer={"max_epochs": 2})
    train(lightning, tmp_path, optimizing(lightning, torch.optim.Adam), trainer={"max_epochs": 2})
