"""Which adapter a model needs; frameworks are imported only once they are known to be in use."""

import sys
from typing import TYPE_CHECKING, Final, Literal, TypeGuard, cast

from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.model import Model

if TYPE_CHECKING:
    from mlx.nn import Module as MlxModule
    from torch import nn

_MODEL_MEMBERS: Final = ("schema", "frozen_fingerprint", "read", "write", "reset_optimizer")


def resolve(model: object, *, buffers: Literal["local", "mean"] = "local") -> Model:
    """``model`` itself if it already is a :class:`Model`, else the adapter for its framework.

    ``buffers`` says who owns a module's floating-point buffers, see
    :class:`gradientmail_core.adapters.torch.TorchModel`.

    A framework that this process never imported cannot have made ``model``, so none is imported here.
    Raises :class:`ConfigurationError` for anything else, and whatever the adapter refuses.
    """
    members = dir(type(model)) + list(getattr(model, "__dict__", {}))
    if all(member in members for member in _MODEL_MEMBERS):
        return cast(Model, model)
    if "torch" in sys.modules and _is_torch(model):
        from gradientmail_core.adapters.torch import TorchModel

        return TorchModel(model, buffers=buffers)
    if "mlx.nn" in sys.modules and _is_mlx(model):
        from gradientmail_core.adapters.mlx import MlxModel

        return MlxModel(model, buffers=buffers)
    raise ConfigurationError(
        f"A model of type {type(model).__module__}.{type(model).__qualname__} cannot be trained.",
        "Give a torch.nn.Module, an mlx.nn.Module, or what has the members of gradientmail_core.tensors.model.Model.",
    )


def framework_of(model: Model) -> str:
    """``torch`` or ``mlx``; empty for a model that brought its own adapter."""
    modules = [kind.__module__ for kind in type(model).__mro__ if kind.__module__.startswith(f"{__package__}.")]
    return modules[0].rpartition(".")[2].partition("_")[0] if modules else ""


def _is_torch(model: object) -> TypeGuard["nn.Module"]:
    import torch

    return isinstance(model, torch.nn.Module)


def _is_mlx(model: object) -> TypeGuard["MlxModule"]:
    import mlx.nn

    return isinstance(model, mlx.nn.Module)
