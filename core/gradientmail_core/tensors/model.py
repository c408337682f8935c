"""What the library asks of a model: its schema, and copies of a fragment in and out.

An adapter (``gradientmail_core.adapters``) implements this for a framework. Both copies run on the
training thread, the only one that touches the model.
"""

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradientmail_core.tensors.schema import FragmentLayout, Schema

Flat: TypeAlias = NDArray[np.float32]


class Model(Protocol):
    """A trainable model, seen as flat fp32 fragments."""

    @property
    def schema(self) -> Schema:
        """The trainable tensors under their canonical names."""
        ...

    @property
    def frozen_fingerprint(self) -> str | None:
        """sha256 over the frozen parameters, equal on every node of a run; None without any."""
        ...

    def read(self, layout: FragmentLayout, out: Flat) -> None:
        """Copy the fragment's current values into ``out`` (fp32, ``layout.size`` elements)."""
        ...

    def write(self, layout: FragmentLayout, values: Flat) -> None:
        """Overwrite the fragment's parameters in place, so optimizer state and aliases survive."""
        ...

    def reset_optimizer(self) -> None:
        """Forget the inner optimizer's state; called when the node is rolled back."""
        ...
