"""An MLX module as named fp32 fragments, read and written on the training thread.

What it promises: a module's schema is what HF Transformers' module of the same architecture has, where
mlx-lm keeps its names and shapes (Llama and its kin), so a Mac and a CUDA machine can be in one run;
modules that hang in two places count once; only trainable parameters travel, LoRA's included, and the
frozen rest, quantised or not, is reduced to a fingerprint. bf16 crosses over as integer views, and is
rounded by the same code as everywhere else.

MLX computes when a value is asked for, on the stream of the thread that asks, and another thread cannot
ask for it. So ``read`` evaluates and copies, and ``write`` leaves evaluated arrays in the module: no lazy
array is ever handed to or left for another thread. Arrays are values in MLX: ``write`` puts new ones in
the same places through ``Module.update``. Optimizer state is keyed by place and stays; a compiled step
reads the module's state anew at each call and goes on with them.

Tied weights are one module in two places. Two modules that were given one array are no tie in MLX: the
first optimizer step parts them, so they are two tensors here.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Literal, TypeAlias

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from gradientmail_core.adapters.digests import Chunks, Hashed, combined_digest
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.codec_float import round_to_bf16, widen_bf16
from gradientmail_core.tensors.kernels import for_blocks
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.schema import FragmentLayout, Piece, Role, Schema, TensorSpec

Keys: TypeAlias = tuple[str | int, ...]
Tree: TypeAlias = Any
"""Modules, dicts and lists around arrays, which MLX itself gives no type."""
Host: TypeAlias = NDArray[np.generic]
"""An array's values in host memory: bit patterns (uint16) for bf16, else numbers of its own type."""

_TRAINABLE_DTYPES: Final = (mx.float16, mx.bfloat16, mx.float32, mx.float64)
_RUNNING: Final = frozenset({"running_mean", "running_var"})
_CHUNK_ELEMENTS: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array hangs: ``keys`` lead there from the root, ``owner`` is the innermost module."""

    keys: Keys
    owner: nn.Module
    holder: object

    @property
    def name(self) -> str:
        """The name MLX gives it."""
        return ".".join(str(key) for key in self.keys)

    @property
    def identity(self) -> tuple[int, str | int]:
        """Equal for two places that are one."""
        return id(self.holder), self.keys[-1]


class MlxModel:
    """Implements :class:`gradientmail_core.tensors.model.KeepingModel` for ``mlx.nn.Module``.

    Raises :class:`ConfigurationError` when nothing is trainable, or when something trainable is of a type
    that cannot be merged (packed integers of a quantised layer, complex numbers). ``buffers="mean"`` also
    takes a BatchNorm's running statistics to the run, which merges them by their mean. ``written`` and
    ``was_reset`` note what was done to the module and its optimizers, for whoever mirrors it.
    """

    def __init__(self, module: nn.Module, *, buffers: Literal["local", "mean"] = "local") -> None:
        if buffers not in ("local", "mean"):
            raise ConfigurationError(f"buffers is {buffers!r}.", "Use 'mean' or 'local'.")
        self.module = module
        self.written: set[str] = set()
        self.was_reset = False
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        trainable_names = set(_names(module.trainable_parameters()))
        groups = _tied(module)
        trainable = [group for group in groups if any(place.name in trainable_names for place in group)]
        if not trainable:
            raise ConfigurationError(
                f"{type(module).__name__} has no trainable parameters.",
                "Call unfreeze() on what is to train, or add LoRA layers, before the run is joined.",
            )
        if buffers == "mean":
            trainable += [group for group in groups if _is_running(group[0])]
        self._trainable: Mapping[str, tuple[Place, ...]] = {group[0].name: group for group in trainable}
        for name in self._trainable:
            _refuse_untrainable(name, self.array(name))
        frozen = [group[0] for group in groups if group[0].name not in self._trainable]
        self._frozen = tuple(place for place in frozen if not _is_running(place))
        self._running = tuple(place for place in frozen if _is_running(place))
        self._schema = Schema.of(self._specs())

    @property
    def schema(self) -> Schema:
        """The trainable tensors under their canonical names."""
        return self._schema

    @cached_property
    def frozen_fingerprint(self) -> str | None:
        """sha256 over name, shape and values of every frozen parameter; None without any.

        Computed at the first call and kept. Equal to that of a torch module with the same names and values.
        """
        return combined_digest([self._hashed(place) for place in self._frozen])

    @property
    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """The other names of each tied tensor, by its canonical name."""
        groups = {name: places for name, places in self._trainable.items() if len(places) > 1}
        return {name: tuple(place.name for place in places[1:]) for name, places in groups.items()}

    @property
    def unmerged_buffers(self) -> list[str]:
        """Running statistics (BatchNorm), if each node keeps its own."""
        return [place.name for place in self._running]

    def array(self, name: str) -> mx.array:
        """The parameter of that canonical name, as it is now."""
        return _at(self.module, self._trainable[name][0].keys)

    def read(self, layout: FragmentLayout, out: Flat) -> None:
        """Copy the fragment's current values into ``out`` (fp32, ``layout.size`` elements)."""
        arrays = {piece.name: self.array(piece.name) for piece in layout.pieces}
        mx.eval(list(arrays.values()))
        for piece in layout.pieces:
            _widen(_rows(_host(arrays[piece.name]), piece), out[piece.offset : piece.offset + piece.elements])

    def write(self, layout: FragmentLayout, values: Flat) -> None:
        """Replace the fragment's parameters (``values``: fp32, ``layout.size`` elements), in their own dtypes."""
        hosts: dict[str, Host] = {}
        for piece in layout.pieces:
            flat = values[piece.offset : piece.offset + piece.elements]
            host = hosts[piece.name] = self._room(piece, hosts)
            _rows(host, piece)[...] = _narrowed(flat, host.dtype).reshape(piece.shape)
        self.put({name: _array(host, self.array(name).dtype) for name, host in hosts.items()})

    def put(self, arrays: Mapping[str, mx.array]) -> None:
        """Set parameters by canonical name, evaluated."""
        mx.eval(list(arrays.values()))
        self.written |= arrays.keys()
        self.module.update(_partial(self.module, {self._trainable[name][0].keys: new for name, new in arrays.items()}))

    def keep(self) -> Mapping[str, mx.array]:
        """The trainable parameters as they are; no copy, because arrays are values."""
        arrays = {name: self.array(name) for name in self._trainable}
        mx.eval(list(arrays.values()))
        return arrays

    def restore(self, kept: object) -> None:
        """Write back what :meth:`keep` returned."""
        assert isinstance(kept, dict)
        self.put(kept)

    def track_optimizer(self, optimizer: Optimizer) -> None:
        """Let :meth:`reset_optimizer` reach this optimizer, for as long as somebody else keeps it."""
        parts = optimizer.optimizers if isinstance(optimizer, MultiOptimizer) else [optimizer]
        for part in parts:
            self._optimizers.add(part)

    def reset_optimizer(self) -> None:
        """Set the state of every tracked optimizer back to its start, in the same dicts.

        A compiled step holds on to the dicts, and would go on with the old state if they were replaced. The
        count of steps starts anew too, except where a schedule of the learning rate runs by it.
        """
        self.was_reset = True
        for optimizer in list(self._optimizers):
            _reset(optimizer, self.module.trainable_parameters())

    def _room(self, piece: Piece, hosts: Mapping[str, Host]) -> Host:
        """Where to write a piece: fresh memory for a whole tensor, a copy of its values for some rows of it."""
        if piece.name in hosts:
            return hosts[piece.name]
        current = self.array(piece.name)
        if piece.rows is None:
            return np.empty(tuple(current.shape), _host_dtype(current))
        mx.eval(current)
        return np.array(_host(current))

    def _specs(self) -> list[TensorSpec]:
        embeddings = [module for module in self.module.modules() if isinstance(module, nn.Embedding)]
        vocabularies = {tuple(module.weight.shape) for module in embeddings}
        names = self._trainable
        return [TensorSpec(name, tuple(self.array(name).shape), self._role(name, vocabularies)) for name in names]

    def _role(self, name: str, vocabularies: set[tuple[int, ...]]) -> Role:
        """A head is a linear layer of an embedding's shape outside the numbered blocks."""
        place, shape = self._trainable[name][0], tuple(self.array(name).shape)
        if _is_running(place):
            return "buffer"
        if len(shape) <= 1:
            return "vector"
        if isinstance(place.owner, nn.Embedding):
            return "embedding"
        in_block = any(str(key).isdigit() for key in place.keys)
        return "head" if isinstance(place.owner, nn.Linear) and not in_block and shape in vocabularies else "matrix"

    def _hashed(self, place: Place) -> Hashed:
        array = _at(self.module, place.keys)
        mx.eval(array)
        host, exact = _host(array), array.dtype in (mx.float16, mx.bfloat16)
        return Hashed(place.name, tuple(array.shape), partial(_chunks, host, exact))


def _names(tree: Tree) -> list[str]:
    return list(dict(tree_flatten(tree)))


def _places(module: nn.Module) -> Iterator[Place]:
    """Every way to reach every array below ``module``, aliases included, as ``Module.parameters`` finds them."""
    yield from _below(module, module, ())


def _below(holder: Tree, owner: nn.Module, keys: Keys) -> Iterator[Place]:
    items = list(enumerate(holder)) if isinstance(holder, list) else list(holder.items())
    for key, value in items:
        if isinstance(holder, nn.Module) and str(key).startswith("_"):
            continue
        if isinstance(value, mx.array):
            yield Place((*keys, key), owner, holder)
        elif isinstance(value, dict | list):
            yield from _below(value, value if isinstance(value, nn.Module) else owner, (*keys, key))


def _tied(module: nn.Module) -> list[tuple[Place, ...]]:
    """All arrays, each with the places that are one with it; the first in name order speaks for them."""
    groups: dict[tuple[int, str | int], list[Place]] = {}
    for place in _places(module):
        groups.setdefault(place.identity, []).append(place)
    return [tuple(sorted(group, key=lambda place: place.name)) for group in groups.values()]


def _at(node: Tree, keys: Keys) -> mx.array:
    for key in keys:
        node = node[key]
    array: mx.array = node
    return array


def _partial(node: Tree, new: Mapping[Keys, mx.array]) -> Tree:
    """``new`` as the tree that ``Module.update`` takes: what does not change is left out, or stands for itself."""
    if () in new:
        return new[()]
    heads: dict[str | int, dict[Keys, mx.array]] = {}
    for keys, array in new.items():
        heads.setdefault(keys[0], {})[keys[1:]] = array
    if not isinstance(node, list):
        return {head: _partial(node[head], rest) for head, rest in heads.items()}
    return [_partial(child, heads[index]) if index in heads else _same(child) for index, child in enumerate(node)]


def _same(child: Tree) -> Tree:
    return child if isinstance(child, mx.array) else {}


def unfrozen(module: nn.Module) -> dict[str, mx.array]:
    """What a trainer's state is made of, by name: parameters that train, and running statistics."""
    trainable = set(_names(module.trainable_parameters()))
    places = [place for group in _tied(module) for place in group]
    return {place.name: _at(module, place.keys) for place in places if place.name in trainable or _is_running(place)}


def _is_running(place: Place) -> bool:
    return isinstance(place.owner, nn.BatchNorm) and place.keys[-1] in _RUNNING


def _host_dtype(array: mx.array) -> np.dtype[np.generic]:
    kinds = {mx.bfloat16: np.uint16, mx.float16: np.float16, mx.float32: np.float32, mx.float64: np.float64}
    return np.dtype(kinds[array.dtype])


def _host(array: mx.array) -> Host:
    """The values of an evaluated array, without a copy where its memory is in order."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _array(host: Host, dtype: mx.Dtype) -> mx.array:
    return mx.array(host).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(host, dtype=dtype)


def _rows(host: Host, piece: Piece) -> Host:
    return host if piece.rows is None else host[piece.rows[0] : piece.rows[1]]


def _widen(host: Host, out: Flat) -> None:
    flat = np.ravel(host)
    if flat.dtype == np.uint16:
        for_blocks(out.size, lambda i, j: widen_bf16(flat[i:j].view(np.uint16), out[i:j]))
    else:
        for_blocks(out.size, lambda i, j: np.copyto(out[i:j], flat[i:j], casting="same_kind"))


def _narrowed(values: Flat, dtype: np.dtype[np.generic]) -> Host:
    """``values`` rounded to nearest even; too large for fp16 becomes infinite."""
    if dtype == np.float32:
        return values
    out = np.empty(values.size, dtype)
    for_blocks(values.size, _rounding(values, out))
    return out


def _rounding(values: Flat, out: Host) -> Callable[[int, int], None]:
    def block(start: int, stop: int) -> None:
        if out.dtype == np.uint16:
            round_to_bf16(values[start:stop], out[start:stop].view(np.uint16))
            return
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.copyto(out[start:stop], values[start:stop], casting="same_kind")

    return block


def _chunks(host: Host, exact: bool) -> Chunks:
    """The values in order, as fp32 where that is exact."""
    flat = np.ravel(host)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS]
        if exact:
            wide = np.empty(chunk.size, np.float32)
            _widen(chunk, wide)
            chunk = wide
        yield np.ascontiguousarray(chunk)


def _reset(optimizer: Optimizer, parameters: Tree) -> None:
    _restart(optimizer.init_single, parameters, optimizer.state)
    if not optimizer._schedulers:
        optimizer.state["step"] = mx.zeros_like(optimizer.state["step"])
    mx.eval(optimizer.state)


def _restart(initial: Callable[[mx.array, Tree], object], parameters: Tree, state: Tree) -> None:
    """Set the state of every parameter that has one to its initial values."""
    if isinstance(parameters, mx.array):
        if state:
            initial(parameters, state)
        return
    for key in range(len(parameters)) if isinstance(parameters, list) else parameters:
        if (key < len(state)) if isinstance(state, list) else (key in state):
            _restart(initial, parameters[key], state[key])


def _refuse_untrainable(name: str, array: mx.array) -> None:
    if array.dtype not in _TRAINABLE_DTYPES:
        raise ConfigurationError(
            f"{name} is trainable but is of {array.dtype}.",
            "Only floating-point numbers can be merged: freeze it and train adapters (LoRA) on it.",
        )
