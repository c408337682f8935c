"""Canonical parameter names: what a tensor is called once every wrapper is looked through.

Nodes of one run must agree on names although one compiles its model, the next wraps it for data
parallelism and a third trains it inside a Lightning module. A wrapper is recognised by what it is, not
by how its child is called: ``module`` disappears below a ``DistributedDataParallel``, and stays where a
model has a child of its own by that name. Only attribute names that nobody but a wrapper uses
(``_orig_mod`` and the like) disappear wherever they stand.

Wrappers are known by their class names, so that none of the libraries they come from is imported here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from torch import Tensor, nn

_ALWAYS_TRANSPARENT: Final = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Attributes of torch.compile, FSDP, activation checkpointing and Lightning Fabric."""

_TRANSPARENT_BELOW: Final[Mapping[str, str]] = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "BaseTunerLayer": "base_layer",
    "ModulesToSaveWrapper": "original_module",
}
"""Class name of a wrapper and the child that it adds nothing to but a name."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter or buffer hangs: ``owner`` holds it as ``attribute``; ``path`` is its canonical name."""

    path: str
    owner: nn.Module
    attribute: str

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, or the buffer, that hangs there now."""
        held: Tensor | None = self.owner._parameters.get(self.attribute)
        if held is None:
            held = self.owner._buffers[self.attribute]
        return cast(nn.Parameter, held)


def is_a(module: object, class_name: str) -> bool:
    """Whether ``module`` is of a class of that name, or of one derived from it."""
    return any(kind.__name__ == class_name for kind in type(module).__mro__)


def is_transparent(parent: object, child: str) -> bool:
    """Whether ``child`` of ``parent`` is the thing a wrapper wraps, so that its name does not count."""
    if child in _ALWAYS_TRANSPARENT:
        return True
    return any(_TRANSPARENT_BELOW.get(kind.__name__) == child for kind in type(parent).__mro__)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside all wrappers around the root."""
    for child, inner in module.named_children():
        if is_transparent(module, child):
            return unwrapped(inner)
    return module


def places(module: nn.Module) -> Iterator[Place]:
    """Every way to reach every parameter below ``module``, aliases included."""
    for owner, path in _owners(module, ""):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                yield Place(path + attribute, owner, attribute)


def buffer_places(module: nn.Module) -> Iterator[Place]:
    """Every way to reach every buffer below ``module`` that a checkpoint holds."""
    for owner, path in _owners(module, ""):
        for attribute, buffer in owner._buffers.items():
            if buffer is not None and attribute not in owner._non_persistent_buffers_set:
                yield Place(path + attribute, owner, attribute)


def _owners(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str]]:
    yield module, prefix
    for child, inner in module._modules.items():
        if inner is not None:
            yield from _owners(inner, prefix if is_transparent(module, child) else f"{prefix}{child}.")


def common_attribute(aliases: Iterable[Sequence[str]]) -> str | None:
    """The root attribute that every tensor can be reached through, or None.

    ``aliases`` holds all names of each tensor. Several attributes can qualify only when they hold the
    same modules; the first in name order stands for them.
    """
    roots = [{name.partition(".")[0] for name in names if "." in name} for names in aliases]
    shared = set.intersection(*roots) if roots else set()
    return min(shared, default=None)


def below(attribute: str | None, name: str) -> str:
    """``name`` without the leading ``attribute``, where it has one."""
    return name if attribute is None else name.removeprefix(f"{attribute}.")
