"""The demo's model."""

import math

import pytest
import torch

from gradientmail_core.errors import ConfigurationError
from gradientmail_lightning.demo.model import ByteGPT, LanguageModel, ModelSize, held_out_loss, next_byte_loss

SIZE = ModelSize(width=32, layers=2, context=16)


def test_untrained_loss_is_that_of_a_guess() -> None:
    torch.manual_seed(0)
    window = torch.randint(0, 256, (4, 17))
    assert next_byte_loss(ByteGPT(SIZE), window).item() == pytest.approx(math.log(256), abs=0.1)


def test_a_prediction_does_not_see_its_future() -> None:
    torch.manual_seed(0)
    model, text = ByteGPT(SIZE), torch.randint(0, 256, (1, 16))
    changed = text.clone()
    changed[0, 10:] = 0
    with torch.no_grad():
        assert torch.allclose(model(text)[0, :10], model(changed)[0, :10], atol=1e-6)


def test_it_learns_a_repeated_text() -> None:
    torch.manual_seed(0)
    model = LanguageModel(SIZE, lr=1e-2, lr_warmup=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    window = torch.arange(17).repeat(4, 1)
    for _ in range(60):
        optimizer.zero_grad()
        next_byte_loss(model, window).backward()
        optimizer.step()
    assert held_out_loss(model, [window]) < 1.0


def test_impossible_sizes_are_explained() -> None:
    with pytest.raises(ConfigurationError, match="multiple of 32"):
        ModelSize(width=33, layers=1, context=8)
