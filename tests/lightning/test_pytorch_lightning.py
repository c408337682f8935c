"""The same strategies under Lightning's other name: other classes, alike in everything."""

import subprocess
import sys

import gradientmail_lightning
from tests.lightning.nodes import NAMESPACES, namespace

NAMES = ("GradientMailStrategy", "GradientMailDDPStrategy", "GradientMailModelParallelStrategy")


def test_each_namespace_has_classes_of_its_own():
    ours, theirs = (namespace(name) for name in NAMESPACES)
    for name in NAMES:
        first, second = getattr(ours.gm, name), getattr(theirs.gm, name)
        assert first is not second
        assert issubclass(first, ours.pl.strategies.Strategy)
        assert issubclass(second, theirs.pl.strategies.Strategy)
        assert not issubclass(second, ours.pl.strategies.Strategy)
        assert (first.strategy_name, first.__mro__[1]) == (second.strategy_name, second.__mro__[1])
    assert gradientmail_lightning.GradientMailStrategy is ours.gm.GradientMailStrategy


def test_where_only_pytorch_lightning_is_installed_its_classes_are_the_ones():
    program = """
import importlib.util, os, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "lightning" else found(name, *rest)
import gradientmail_lightning, pytorch_lightning
assert issubclass(gradientmail_lightning.GradientMailStrategy, pytorch_lightning.strategies.SingleDeviceStrategy)
assert "gradientmail_lightning.lightning_pytorch" not in sys.modules
os._exit(0)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
