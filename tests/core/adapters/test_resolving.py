"""Modules get an adapter, models pass through, and anything else is told what would do."""

import subprocess
import sys

import pytest
from torch import nn

from gradientmail_core.adapters import resolve
from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.errors import ConfigurationError


class Stub:
    """Has a model's members, some as attributes of the instance."""

    def __init__(self) -> None:
        self.schema = None
        self.frozen_fingerprint = None

    def read(self, layout, out):
        raise NotImplementedError

    write = read

    def reset_optimizer(self):
        raise NotImplementedError


def test_modules_are_adapted_and_models_pass_through():
    model = resolve(nn.Linear(2, 2))
    assert isinstance(model, TorchModel)
    assert resolve(model) is model
    stub = Stub()
    assert resolve(stub) is stub


def test_anything_else_is_refused():
    with pytest.raises(ConfigurationError, match=r"builtins\.dict cannot be trained.*torch\.nn\.Module"):
        resolve({"weight": 1})


def test_no_framework_is_imported_to_find_out():
    script = """
import sys
from gradientmail_core.adapters import resolve
try:
    resolve(3)
except ValueError:
    sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
