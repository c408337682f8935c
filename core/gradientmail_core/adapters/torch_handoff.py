"""A PyTorch trainer's state as arrays and plain values: module, optimizer, random numbers, and what else has a state.

Tensors go as their bytes, with their dtype by name, so every format comes back bit for bit; the rest is rebuilt as the
lists, tuples and dictionaries it was. Nothing is pickled. Parameters that do not train are left out: they are the same
on every node, and an adapter's base model is many times as large as the adapter.
"""

import math
import random
from collections.abc import Iterable, Mapping
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
        torch.uint8, torch.uint32, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
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
        self._parts: dict[str, Stateful] = {"module": Unfrozen(module), **others}
        if optimizer is not None:
            self._parts["optimizer"] = Stepping(optimizer)

    def save(self) -> Belongings:
        """A copy of everything, on the host."""
        arrays: dict[str, Array] = {}
        plain = {name: taken(part.state_dict(), name, arrays) for name, part in self._parts.items()}
        plain["random"] = taken(random_state(), "random", arrays)
        return Belongings(arrays, plain)

    def load(self, belongings: Belongings) -> None:
        """Set everything to what was saved. Raises :class:`ConfigurationError` if that was another kind of trainer."""
        lacking = sorted(self._parts.keys() ^ (belongings.plain.keys() - {"random"}))
        if lacking:
            raise ConfigurationError(
                f"The hand-off and this program differ in {', '.join(lacking)}.",
                "Start the program that made it, or use another node name.",
            )
        found = {
            name: cast(dict[str, object], given(belongings.plain[name], belongings.arrays)) for name in self._parts
        }
        for name, part in self._parts.items():
            if isinstance(part, Stepping):
                part.check(found[name])
        for name, part in self._parts.items():
            part.load_state_dict(found[name])
        set_random_state(given(belongings.plain["random"], belongings.arrays))


class Unfrozen:
    """A module's state without what does not train: see :func:`unfrozen`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, object]:
        """Parameters that train, and buffers."""
        names = unfrozen(self._module)
        return {name: value for name, value in self._module.state_dict().items() if name in names}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Raises :class:`ConfigurationError` where the names are not those of this module."""
        check_names(self._module, state_dict)
        self._module.load_state_dict(state_dict, strict=False)


class Stepping:
    """An optimizer's state with its kind and the sizes of its groups: torch takes another kind's without a word."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, object]:
        """The optimizer's state, and what it is."""
        return {**self.kind(), "state": self._optimizer.state_dict()}

    def kind(self) -> dict[str, object]:
        """What it is: the name of its class, and how many parameters each of its groups has."""
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        return {"kind": type(self._optimizer).__name__, "groups": groups}

    def check(self, state_dict: dict[str, object]) -> None:
        """Raise :class:`ConfigurationError` for the state of another optimizer."""
        own = self.kind()
        for word, name in (("optimizer", "kind"), ("parameter groups", "groups")):
            if state_dict.get(name) != own[name]:
                raise ConfigurationError(
                    f"The hand-off and this program differ in {word}: {state_dict.get(name)} there, {own[name]} here.",
                    "Start the program that made it, or use another node name.",
                )

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Raises :class:`ConfigurationError` for the state of another optimizer."""
        self.check(state_dict)
        self._optimizer.load_state_dict(cast("dict[str, object]", state_dict["state"]))


def unfrozen(module: torch.nn.Module) -> frozenset[str]:
    """The names in the module's ``state_dict`` of its parameters that train, under all their names, and buffers."""
    parameters = module.named_parameters(remove_duplicate=False)
    names = {name for name, parameter in parameters if parameter.requires_grad}
    return frozenset(
        (names | {name for name, _ in module.named_buffers(remove_duplicate=False)}) & {*module.state_dict()}
    )


def check_names(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Raise :class:`ConfigurationError` unless these are the :func:`unfrozen` names of ``module``."""
    differing = sorted(unfrozen(module).symmetric_difference(names))
    if differing:
        raise ConfigurationError(
            f"The hand-off and this program differ in {', '.join(differing[:5])}.",
            "Build the model that made it, or use another node name.",
        )


def random_state() -> dict[str, object]:
    """The state of Python's, numpy's and torch's global generators, as :func:`taken` can take it."""
    numpy: tuple[object, ...] = np.random.get_state(legacy=True)  # type: ignore[assignment]  # typed with a dictionary
    return {
        "python": random.getstate(),
        "numpy": numpy,
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: object) -> None:
    """Set the generators to what :func:`random_state` returned, those of CUDA where there are as many devices."""
    match state:
        case {"cpu": Tensor() as cpu, "cuda": list() as cuda}:
            torch.set_rng_state(cpu)
            if cuda and len(cuda) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(cuda)
    match state:
        case {"python": tuple() as python, "numpy": tuple() as numpy}:
            random.setstate(python)
            np.random.set_state(numpy)


def taken(value: object, path: str, arrays: dict[str, Array]) -> object:
    """``value`` as JSON, its tensors put into ``arrays`` under their path.

    Raises :class:`ConfigurationError`, with the path, for what is neither a number, text, a tensor nor a container.
    """
    match value:
        case Tensor():
            name = str(value.dtype).removeprefix("torch.")
            if name not in _DTYPES:
                raise ConfigurationError(f"{path} is a tensor of {value.dtype}.", "Hand on tensors of plain numbers.")
            solid = value.detach().to("cpu", copy=True).contiguous()
            arrays[path] = solid.reshape(-1).view(torch.uint8).numpy()
            return {"tensor": path, "dtype": name, "shape": list(value.shape)}
        case np.ndarray() if str(value.dtype) in _DTYPES:
            arrays[path] = value.copy()
            return {"array": path}
        case Mapping():
            return {"dict": [[_key(key, path), taken(item, f"{path}/{key}", arrays)] for key, item in value.items()]}
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [taken(item, f"{path}/{index}", arrays) for index, item in enumerate(value)]}
        case float() if not math.isfinite(value):
            return {"float": str(float(value))}
        case None | bool() | int() | float() | str():
            return value
        case np.bool_() | np.integer() | np.floating():
            return taken(value.item(), path, arrays)
        case _:
            raise ConfigurationError(f"{path} is a {type(value).__name__}.", "Hand on numbers, text and containers.")


def _key(key: object, path: str) -> object:
    if key is None or isinstance(key, bool | int | float | str):
        return key
    raise ConfigurationError(f"{path} has a key of type {type(key).__name__}.", "Use text or numbers for keys.")


def given(value: object, arrays: Mapping[str, Array]) -> object:
    """What :func:`taken` took."""
    match value:
        case {"tensor": path, "dtype": name, "shape": shape}:
            raw = torch.from_numpy(np.ascontiguousarray(arrays[path]).copy())
            return raw.view(_DTYPES[name]).reshape(shape)
        case {"array": path}:
            return arrays[path].copy()
        case {"float": text}:
            return float(text)
        case {"dict": items}:
            return {key: given(item, arrays) for key, item in items}
        case {"list": items}:
            return [given(item, arrays) for item in items]
        case {"tuple": items}:
            return tuple(given(item, arrays) for item in items)
        case _:
            return value
