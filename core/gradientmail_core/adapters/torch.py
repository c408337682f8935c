"""A PyTorch module as named fp32 fragments, read and written in place.

What it promises: the schema of a model is the same under ``torch.compile``, DDP, FSDP2, PEFT and
Lightning; weights that are tied appear once; only trainable parameters travel, and the frozen rest is
reduced to a fingerprint that must be equal on every node. Writing copies into the parameters' own
memory, whatever its strides, dtype or device: optimizer state, ties and compiled code stay valid.

Names. Of a tied tensor's names the one below an ``nn.Embedding`` is taken, then the first in order, so
that the order in which modules were built has no say. A Lightning module is a training loop around a
model: where every trainable parameter is reachable through one of its attributes, that attribute is
left out of the names, and a node that trains the bare model is in the same run. With trainable
parameters under several attributes there is no such model, and all names stay.

Sharded parameters (DTensor) are gathered by ``read`` and scattered by ``write``: both are collectives
there, and every rank of the mesh must call them with the same layouts in the same order.
"""

import gc
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias, TypeGuard, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gradientmail_core.adapters.fingerprint import fingerprint, wraps_tensors
from gradientmail_core.adapters.names import Place, below, buffer_places, common_attribute, is_a, places, unwrapped
from gradientmail_core.adapters.staging import Staging
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Piece, Role, Schema, TensorSpec

_TRAINABLE_DTYPES: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_EMBEDDINGS: Final = (nn.Embedding, nn.EmbeddingBag)

Buffers: TypeAlias = Literal["local", "mean"]
"""Who owns a model's floating-point buffers: each node, or the run."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A tensor of the model: its canonical name, all its other names, and where it hangs.

    The parameter is looked up anew at each use, so one that was replaced (``fully_shard``, ``to_empty``)
    is found where it now is.
    """

    name: str
    aliases: tuple[str, ...]
    places: tuple[Place, ...]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is now."""
        return self.places[0].parameter


class TorchModel:
    """Implements :class:`gradientmail_core.tensors.model.Model` for ``torch.nn.Module``.

    ``strip_attribute`` leaves the one attribute that leads to all trainable parameters out of their
    names; None means only for Lightning modules (see the module's docstring).

    ``buffers="mean"`` also takes the floating-point buffers that a checkpoint holds (a BatchNorm's statistics) to
    the run, which averages them and steps no outer optimizer on them; all nodes must say the same. With ``"local"``
    each node keeps its own, and one that joins late, or only aligns, has those of its own start.

    Raises :class:`ConfigurationError` when nothing is trainable, or when something trainable cannot be
    merged: quantised, complex or integer tensors, tensors without memory, FSDP1 and DeepSpeed shards.
    """

    def __init__(self, module: nn.Module, *, strip_attribute: bool | None = None, buffers: Buffers = "local") -> None:
        if buffers not in get_args(Buffers):
            raise ConfigurationError(f"buffers is {buffers!r}.", "Use 'mean' or 'local'.")
        root = unwrapped(module)
        self.module = module
        self._strip = is_a(root, "LightningModule") if strip_attribute is None else strip_attribute
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._staging: dict[torch.device, Staging] = {}
        _refuse_unusable_module(module)
        bound, self._attribute = _bound(module, self._strip)
        trainable = [tensor for tensor in bound if tensor.parameter.requires_grad]
        if not trainable:
            raise ConfigurationError(
                f"{type(root).__name__} has no trainable parameters.",
                "Set requires_grad=True on those to train, before the run is joined.",
            )
        for tensor in trainable:
            _refuse_untrainable(tensor)
        self._buffers = _bound_buffers(module, self._attribute) if buffers == "mean" else []
        self._trainable: Mapping[str, Bound] = {tensor.name: tensor for tensor in [*trainable, *self._buffers]}
        self._frozen = tuple(tensor for tensor in bound if not tensor.parameter.requires_grad)
        self._schema = Schema.of([*_specs(module, trainable), *_buffer_specs(self._buffers)])

    @property
    def schema(self) -> Schema:
        """The trainable tensors, and the buffers that are merged, under their canonical names."""
        return self._schema

    @cached_property
    def frozen_fingerprint(self) -> str | None:
        """sha256 over name, shape and values of every frozen parameter; None without any.

        Computed at the first call (about a second for each 2 GB and core) and kept.
        """
        return fingerprint([(tensor.name, tensor.parameter.detach()) for tensor in self._frozen])

    @property
    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """The other names of each tied tensor, by its canonical name."""
        return {name: tensor.aliases for name, tensor in self._trainable.items() if tensor.aliases}

    @property
    def unmerged_buffers(self) -> list[str]:
        """Floating-point buffers that a checkpoint holds, such as a BatchNorm's, if each node keeps its own."""
        return [] if self._buffers else [tensor.name for tensor in _bound_buffers(self.module, None)]

    @property
    def sharded(self) -> bool:
        """Whether reading and writing are collectives of several processes."""
        _reshard(self.module)
        return any(isinstance(tensor.parameter, DTensor) for tensor in self._trainable.values())

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of that canonical name."""
        return self._trainable[name].parameter

    @torch.no_grad()
    def read(self, layout: FragmentLayout, out: Flat) -> None:
        """Copy the fragment's current values into ``out`` (fp32, ``layout.size`` elements)."""
        _reshard(self.module)
        for piece in layout.pieces:
            source = _gathered(self.parameter(piece.name))
            target = out[piece.offset : piece.offset + piece.elements]
            if source.device.type == "cuda":
                self._staging_of(source.device).download(_rows(source, piece).reshape(-1), target)
            else:
                torch.from_numpy(target).view(piece.shape).copy_(_rows(source, piece))
        for staging in self._staging.values():
            staging.settle()

    @torch.no_grad()
    def write(self, layout: FragmentLayout, values: Flat) -> None:
        """Overwrite the fragment's parameters in place (``values``: fp32, ``layout.size`` elements).

        A dimension that was expanded (stride 0) has one row in memory: it takes the first one's values.
        """
        _reshard(self.module)
        for piece in layout.pieces:
            flat = values[piece.offset : piece.offset + piece.elements]
            self._store(piece, self._on_device(flat, self.parameter(piece.name).device))

    @torch.no_grad()
    def write_tensor(self, layout: FragmentLayout, values: Tensor) -> None:
        """:meth:`write` for values in a 1-d fp32 tensor, on any device."""
        _reshard(self.module)
        for piece in layout.pieces:
            self._store(piece, values[piece.offset : piece.offset + piece.elements])

    @torch.no_grad()
    def keep(self) -> Mapping[str, Tensor]:
        """A copy in host memory of this process's part of every trainable parameter; no collective."""
        _reshard(self.module)
        return {name: _local(tensor.parameter).to("cpu", copy=True) for name, tensor in self._trainable.items()}

    @torch.no_grad()
    def restore(self, kept: object) -> None:
        """Write back what :meth:`keep` returned, bit for bit."""
        assert isinstance(kept, dict)
        _reshard(self.module)
        for name, values in kept.items():
            _overwrite(_local(self.parameter(name)), values)

    def track_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let :meth:`reset_optimizer` reach this optimizer, for as long as somebody else keeps it."""
        self._optimizers.add(getattr(optimizer, "_optimizer", optimizer))

    def reset_optimizer(self) -> None:
        """Clear the state of every tracked optimizer in place, as if it had never stepped.

        Where none is tracked, as in a loop of the user's own, these are all optimizers that hold a parameter of the
        module: moments that are not finite would poison it again at the next step.
        """
        for optimizer in list(self._optimizers) or self._found_optimizers():
            _clear(optimizer)

    def _found_optimizers(self) -> list[torch.optim.Optimizer]:
        own = {id(parameter) for parameter in self.module.parameters()}
        return [found for found in gc.get_objects() if _is_optimizer(found) and _steps_on(found, own)]

    def newly_trainable(self) -> list[str]:
        """Canonical names of parameters that are trainable now and were not when the schema was made."""
        known = {id(place.parameter) for tensor in self._trainable.values() for place in tensor.places}
        if all(id(parameter) in known for parameter in self.module.parameters() if parameter.requires_grad):
            return []
        bound, _ = _bound(self.module, self._strip, self._attribute)
        return [tensor.name for tensor in bound if tensor.parameter.requires_grad and id(tensor.parameter) not in known]

    def _store(self, piece: Piece, values: Tensor) -> None:
        parameter = self.parameter(piece.name).detach()
        incoming = values.to(parameter.device).view(piece.shape)
        if isinstance(parameter, DTensor):
            _scatter(parameter, piece, incoming)
        else:
            _overwrite(_rows(parameter, piece), incoming)

    def _staging_of(self, device: torch.device) -> Staging:
        if device not in self._staging:
            self._staging[device] = Staging(device)
        return self._staging[device]

    def _on_device(self, values: Flat, device: torch.device) -> Tensor:
        if device.type == "cuda":
            return self._staging_of(device).upload(values)
        return torch.from_numpy(values if values.flags.writeable else values.copy())


def _bound(module: nn.Module, strip: bool, attribute: str | None = None) -> tuple[list[Bound], str | None]:
    """All tensors in name order, and the attribute left out of their names."""
    groups: dict[object, list[Place]] = {}
    for place in places(module):
        groups.setdefault(_identity(place.parameter), []).append(place)
    tied = list(groups.values())
    if strip and attribute is None:
        attribute = common_attribute([[place.path for place in group] for group in tied if _trains(group)])
    bound = [_named(group, attribute) for group in tied]
    return sorted(bound, key=lambda tensor: tensor.name), attribute


def _bound_buffers(module: nn.Module, attribute: str | None) -> list[Bound]:
    """The floating-point buffers that a checkpoint holds, in name order; only those below ``attribute``."""
    groups: dict[int, list[Place]] = {}
    for place in buffer_places(module):
        inside = attribute is None or place.path.startswith(f"{attribute}.")
        if inside and place.parameter.dtype in _TRAINABLE_DTYPES:
            groups.setdefault(id(place.parameter), []).append(place)
    return sorted((_named(group, attribute) for group in groups.values()), key=lambda tensor: tensor.name)


def _buffer_specs(buffers: Iterable[Bound]) -> list[TensorSpec]:
    return [TensorSpec(tensor.name, tuple(tensor.parameter.shape), "buffer") for tensor in buffers]


def _trains(group: Sequence[Place]) -> bool:
    return any(place.parameter.requires_grad for place in group)


def _identity(parameter: nn.Parameter) -> object:
    """Equal for parameters that are one: the same object, or the same memory seen the same way."""
    if isinstance(parameter, DTensor) or parameter.layout != torch.strided or wraps_tensors(parameter):
        return id(parameter)
    if parameter.numel() == 0 or parameter.device.type == "meta":
        return id(parameter)
    return parameter.data_ptr(), parameter.device, parameter.dtype, parameter.shape, parameter.stride()


def _named(group: Sequence[Place], attribute: str | None) -> Bound:
    inside = [place for place in group if attribute is None or place.path.startswith(f"{attribute}.")] or list(group)
    ordered = sorted(inside, key=lambda place: (not isinstance(place.owner, _EMBEDDINGS), place.path))
    paths = list(dict.fromkeys(below(attribute, place.path) for place in ordered))
    return Bound(paths[0], tuple(paths[1:]), tuple(ordered))


def _specs(module: nn.Module, bound: Iterable[Bound]) -> list[TensorSpec]:
    vocabularies = {tuple(child.weight.shape) for child in module.modules() if isinstance(child, _EMBEDDINGS)}
    return [TensorSpec(tensor.name, tuple(tensor.parameter.shape), _role(tensor, vocabularies)) for tensor in bound]


def _role(tensor: Bound, vocabularies: set[tuple[int, ...]]) -> Role:
    """A head is a linear layer of an embedding's shape outside the numbered blocks."""
    shape = tuple(tensor.parameter.shape)
    if len(shape) <= 1:
        return "vector"
    if any(isinstance(place.owner, _EMBEDDINGS) for place in tensor.places):
        return "embedding"
    in_block = any(part.isdigit() for part in tensor.name.split("."))
    is_linear = isinstance(tensor.places[0].owner, nn.Linear)
    return "head" if is_linear and not in_block and shape in vocabularies else "matrix"


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor if piece.rows is None else tensor[piece.rows[0] : piece.rows[1]]


def _reshard(module: nn.Module) -> None:
    """Let FSDP2 put its shards back: a forward pass without a backward leaves whole parameters in their place."""
    for child in module.modules():
        if is_a(child, "FSDPModule"):
            child.reshard()  # type: ignore[operator]  # of FSDPModule


def _gathered(parameter: nn.Parameter) -> Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(parameter: nn.Parameter) -> Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _overwrite(target: Tensor, values: Tensor) -> None:
    for dimension, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:
            target, values = target.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    target.copy_(values)


def _scatter(parameter: DTensor, piece: Piece, values: Tensor) -> None:
    """Give each rank its shard. The values of the mesh's first rank count; the others' are ignored."""
    if piece.rows is None:
        full = values.to(parameter.dtype)
    else:
        full = parameter.full_tensor().clone()
        _rows(full, piece).copy_(values)
    parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))


def _is_optimizer(found: object) -> TypeGuard[torch.optim.Optimizer]:
    """By the type itself: many objects answer ``isinstance`` with code of their own."""
    return issubclass(type(found), torch.optim.Optimizer) and hasattr(found, "param_groups")


def _steps_on(optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> bool:
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def _clear(optimizer: torch.optim.Optimizer) -> None:
    """Drop the state, or reset it where the optimizer makes it when it is built (Adagrad)."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"].zero_()
            state["sum"].fill_(group["initial_accumulator_value"])


def _refuse_unusable_module(module: nn.Module) -> None:
    if any(is_a(child, "FullyShardedDataParallel") for child in module.modules()):
        raise ConfigurationError(
            "The model is wrapped for FSDP1, whose flat parameters have neither names nor shapes.",
            "Use FSDP2: torch.distributed.fsdp.fully_shard, or Lightning's ModelParallelStrategy.",
        )
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise ConfigurationError(
            "The model is partitioned by DeepSpeed, which would undo what is written into the parameters.",
            "Train with DDP or FSDP2.",
        )
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in module.parameters()):
        raise ConfigurationError(
            "The model has lazy parameters without a shape.", "Pass one batch through it before the run is joined."
        )


def _refuse_untrainable(tensor: Bound) -> None:
    parameter = tensor.parameter
    if parameter.device.type == "meta":
        raise ConfigurationError(
            f"{tensor.name} is on the meta device.", "Materialise the model before the run is joined."
        )
    quantised = wraps_tensors(parameter) and not isinstance(parameter, DTensor)
    if quantised or getattr(parameter, "quant_state", None) is not None or parameter.dtype not in _TRAINABLE_DTYPES:
        raise ConfigurationError(
            f"{tensor.name} is trainable but is a {type(parameter.data).__name__} of {parameter.dtype}.",
            "Only float16, bfloat16, float32 and float64 can be merged: freeze it and train adapters (LoRA) on it.",
        )
