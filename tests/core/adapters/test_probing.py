"""A model with a probe is the model, and says what it answers."""

import numpy as np

from gradientmail_core.adapters import resolve
from gradientmail_core.adapters.probing import probed
from gradientmail_core.algorithms.partition import ByBytes
from gradientmail_core.sim.world import ToyModel
from gradientmail_core.tensors.model import Probed


def test_a_probed_model_is_the_model_with_outputs():
    model, outputs = ToyModel(tensors=2, elements=4), np.array([[0.25, 0.75]], np.float32)
    both = probed(model, lambda: outputs)
    assert resolve(both) is both and isinstance(both, Probed) and not isinstance(model, Probed)
    assert both.probe_outputs() is outputs and both.schema == model.schema and both.frozen_fingerprint is None
    (layout,) = ByBytes().layouts(both.schema, 1)
    both.write(layout, np.arange(8, dtype=np.float32))
    read = np.empty(8, np.float32)
    both.read(layout, read)
    assert read.tolist() == list(range(8)) and model.values["block.1.weight"].tolist() == [4.0, 5.0, 6.0, 7.0]
    both.reset_optimizer()
    assert model.resets == 1
