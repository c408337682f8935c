"""What the library asks of a model: its schema, and copies of a fragment in and out.

An adapter (``gradientmail_core.adapters``) implements this for a framework. Both copies run on the
training thread, the only one that touches the model.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

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


@runtime_checkable
class KeepingModel(Model, Protocol):
    """A model that sets its own parameters aside itself; needed where fp32 does not hold their every bit."""

    def keep(self) -> object:
        """A copy of the trainable parameters as they are."""
        ...

    def restore(self, kept: object) -> None:
        """Write back what :meth:`keep` returned."""
        ...


def set_aside(model: Model, layouts: Sequence[FragmentLayout]) -> Callable[[], None]:
    """Copy the model's trainable parameters; calling the result writes them back, bit for bit."""
    if isinstance(model, KeepingModel):
        kept = model.keep()
        return lambda: model.restore(kept)
    copies = [np.empty(layout.size, np.float32) for layout in layouts]
    for layout, copy in zip(layouts, copies, strict=True):
        model.read(layout, copy)

    def write_back() -> None:
        for layout, copy in zip(layouts, copies, strict=True):
            model.write(layout, copy)

    return write_back


@runtime_checkable
class Probed(Protocol):
    """A model that can say what it answers to a small fixed batch, the same batch on every node."""

    def probe_outputs(self) -> NDArray[np.float32]:
        """Probabilities of shape (rows, classes), of the parameters as they are; changes nothing."""
        ...
