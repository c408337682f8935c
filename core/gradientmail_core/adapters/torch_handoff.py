"""A PyTorch trainer's state as arrays and plain values: module, optimizer, random numbers, and what else has a state.

Tensors go as their bytes, with their dtype by name, so every format comes back bit for bit; the rest is rebuilt as the
lists, tuples and dictionaries it was. Nothing is pickled.
"""

from collections.abc import Mapping
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.belongings import Array, Belongings

_DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    )
}  # fmt: skip


class Stateful(Protocol):
    """A scheduler, a sampler, a data stream: anything whose state is made of numbers, text, tensors and containers."""

    def state_dict(self) -> dict[str, object]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Go on from it."""
        ...


class TorchHandoff:
    """What ``Session(handoff=...)`` keeps of a PyTorch trainer. ``others``: scheduler, data and the like."""

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Stateful
    ) -> None:
        self._parts: dict[str, Stateful] = {"module": module, **others}
        if optimizer is not None:
            self._parts["optimizer"] = optimizer

    def save(self) -> Belongings:
        """A copy of everything, on the host."""
        arrays: dict[str, Array] = {}
        plain = {name: _taken(part.state_dict(), name, arrays) for name, part in self._parts.items()}
        plain["random"] = _taken(_random_state(), "random", arrays)
        return Belongings(arrays, plain)

    def load(self, belongings: Belongings) -> None:
        """Set everything to what was saved. Raises :class:`ConfigurationError` if that was another kind of trainer."""
        lacking = sorted(self._parts.keys() ^ (belongings.plain.keys() - {"random"}))
        if lacking:
            raise ConfigurationError(
                f"The hand-off and this program differ in {', '.join(lacking)}.",
                "Start the program that made it, or use another node name.",
            )
        for name, part in self._parts.items():
            part.load_state_dict(cast(dict[str, object], _given(belongings.plain[name], belongings.arrays)))
        match _given(belongings.plain["random"], belongings.arrays):
            case {"cpu": Tensor() as cpu, "cuda": list() as cuda}:
                torch.set_rng_state(cpu)
                if cuda and torch.cuda.is_available():
                    torch.cuda.set_rng_state_all(cuda)


def _random_state() -> dict[str, object]:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _taken(value: object, path: str, arrays: dict[str, Array]) -> object:
    """``value`` as JSON, its tensors put into ``arrays`` under their path."""
    match value:
        case Tensor():
            name = str(value.dtype).removeprefix("torch.")
            if name not in _DTYPES:
                raise ConfigurationError(f"{path} is a tensor of {value.dtype}.", "Hand on tensors of plain numbers.")
            solid = value.detach().to("cpu", copy=True).contiguous()
            arrays[path] = solid.reshape(-1).view(torch.uint8).numpy()
            return {"tensor": path, "dtype": name, "shape": list(value.shape)}
        case Mapping():
            return {"dict": [[key, _taken(item, f"{path}/{key}", arrays)] for key, item in value.items()]}
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [_taken(item, f"{path}/{index}", arrays) for index, item in enumerate(value)]}
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise ConfigurationError(f"{path} is a {type(value).__name__}.", "Hand on numbers, text and containers.")


def _given(value: object, arrays: Mapping[str, Array]) -> object:
    """What :func:`_taken` took."""
    match value:
        case {"tensor": path, "dtype": name, "shape": shape}:
            raw = torch.from_numpy(np.ascontiguousarray(arrays[path]).copy())
            return raw.view(_DTYPES[name]).reshape(shape)
        case {"dict": items}:
            return {key: _given(item, arrays) for key, item in items}
        case {"list": items}:
            return [_given(item, arrays) for item in items]
        case {"tuple": items}:
            return tuple(_given(item, arrays) for item in items)
        case _:
            return value
