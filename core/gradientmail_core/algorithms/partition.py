"""How a model is cut into fragments: every element in exactly one, the same cut on every node.

A partition is a pure function of the schema and the number of fragments. Two are offered: balanced by
size (:class:`ByBytes`, the default: flat bandwidth, and quality equal to the alternatives in Decoupled
DiLoCo, arXiv 2604.21428) and by transformer block, dealt round (:class:`Strided`, Streaming DiLoCo,
arXiv 2501.18512, section 2.3).

A tensor that is larger than one fragment's share is split by rows, the indices of its first dimension,
so that fragments stay balanced when one embedding holds half of the model. Rows of one tensor that end
up side by side in a fragment are one piece.
"""

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from gradientmail_core.algorithms.settings import Named, Settings, named_from
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.schema import FragmentLayout, Piece, Schema, TensorSpec


class Partition(Protocol):
    """A deterministic cut of a schema into fragments."""

    def layouts(self, schema: Schema, fragments: int) -> tuple[FragmentLayout, ...]:
        """One non-empty layout per fragment, in fragment order; together each element exactly once.

        Raises :class:`ConfigurationError` when the model cannot fill that many fragments.
        """
        ...

    def settings(self) -> Settings:
        """Plain JSON, read back by :func:`partition_from`."""
        ...


@dataclass(frozen=True, slots=True)
class ByBytes(Named):
    """Largest first into the lightest fragment (LPT); tensors over a fragment's share are split by rows.

    The heaviest fragment holds at most 4/3 of the lightest possible (Graham 1969) plus what one row that is
    larger than a share adds. A tensor that is cut gives parts of a full share and one smaller rest, so models
    with one huge embedding are balanced too.
    """

    def layouts(self, schema: Schema, fragments: int) -> tuple[FragmentLayout, ...]:
        _check_fillable(schema, fragments)
        return _layouts(_into_lightest(_cut_for(schema.tensors, fragments), [[] for _ in range(fragments)]))


@dataclass(frozen=True, slots=True)
class Strided(Named):
    """Transformer block ``i`` goes to fragment ``i mod P``; the rest fills the lightest fragments.

    A tensor's block is the first whole number among the dotted parts of its canonical name
    (``model.layers.7.mlp.weight`` is in block 7); blocks are counted in the order of those numbers.
    Embeddings, heads and final norms have none and go, split by rows into quarters of a share, to the
    lightest fragments, largest first.
    """

    def layouts(self, schema: Schema, fragments: int) -> tuple[FragmentLayout, ...]:
        _check_fillable(schema, fragments)
        numbers = sorted({block for tensor in schema.tensors if (block := block_number(tensor.name)) is not None})
        fragment_of = {number: index % fragments for index, number in enumerate(numbers)}
        dealt: list[list[_Part]] = [[] for _ in range(fragments)]
        rest: list[TensorSpec] = []
        for tensor in schema.tensors:
            block = block_number(tensor.name)
            if block is None:
                rest.append(tensor)
            else:
                dealt[fragment_of[block]].append(_Part.whole(tensor))
        return _layouts(_into_lightest(_cut(rest, max(1, schema.elements // (4 * fragments))), dealt))


_KNOWN: tuple[type[Partition], ...] = (ByBytes, Strided)
_BLOCK_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def partition_settings(partition: Partition) -> Settings:
    """The partition as plain JSON, for the manifest."""
    return partition.settings()


def partition_from(settings: Mapping[str, object]) -> Partition:
    """The partition that ``settings`` describes; :class:`ConfigurationError` if there is none such."""
    return named_from(settings, _KNOWN, "partition")


def block_number(name: str) -> int | None:
    """The transformer block a canonical tensor name belongs to, or None for embeddings, heads and the like."""
    found = _BLOCK_NUMBER.search(name)
    return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True, order=True)
class _Part:
    """Rows ``start`` to ``stop`` of a tensor; a 0-d tensor counts as one row."""

    name: str
    start: int
    stop: int
    tensor: TensorSpec

    @classmethod
    def whole(cls, tensor: TensorSpec) -> "_Part":
        return cls(tensor.name, 0, _rows(tensor), tensor)

    @property
    def elements(self) -> int:
        return (self.stop - self.start) * _row_elements(self.tensor)


def _rows(tensor: TensorSpec) -> int:
    return tensor.shape[0] if tensor.shape else 1


def _row_elements(tensor: TensorSpec) -> int:
    return tensor.elements // max(_rows(tensor), 1)


def _check_fillable(schema: Schema, fragments: int) -> None:
    """One element a fragment is the least; whether tensors have the rows for it is found out when cutting."""
    if not 1 <= fragments <= schema.elements:
        raise ConfigurationError(
            f"A model of {schema.elements} trainable parameters cannot fill {fragments} fragments.",
            "Use at least one fragment, and no more than there are tensor rows.",
        )


def _cut_for(tensors: Sequence[TensorSpec], fragments: int) -> list[_Part]:
    """Parts of at most an equal share each; of less where rows are too long to give every fragment one."""
    share = sum(tensor.elements for tensor in tensors) // fragments
    while True:
        parts = _cut(tensors, share)
        filled = sum(1 for part in parts if part.elements)
        if filled >= fragments:
            return parts
        if share == 1:
            raise _too_many(fragments, filled)
        share //= 2


def _cut(tensors: Iterable[TensorSpec], share: int) -> list[_Part]:
    """Tensors of up to ``share`` elements whole; of larger ones as many rows at a time as fit, at least one.

    The rest of a cut tensor is small and fills what the large parts leave open.
    """
    parts: list[_Part] = []
    for tensor in tensors:
        rows = _rows(tensor)
        step = rows if tensor.elements <= share else max(1, share // _row_elements(tensor))
        borders = [*range(0, rows, max(step, 1)), rows]
        parts += [_Part(tensor.name, start, stop, tensor) for start, stop in pairwise(borders)] or [_Part.whole(tensor)]
    return parts


def _into_lightest(parts: Iterable[_Part], fragments: list[list[_Part]]) -> list[list[_Part]]:
    """Add ``parts`` largest first, each to the fragment with the fewest elements; ties to the lower number."""
    weights = [(sum(part.elements for part in held), index) for index, held in enumerate(fragments)]
    heapq.heapify(weights)
    for part in sorted(parts, key=lambda part: (-part.elements, part.name, part.start)):
        weight, lightest = weights[0]
        fragments[lightest].append(part)
        heapq.heapreplace(weights, (weight + part.elements, lightest))
    return fragments


def _layouts(fragments: Sequence[Sequence[_Part]]) -> tuple[FragmentLayout, ...]:
    layouts = tuple(FragmentLayout(index, _pieces(held)) for index, held in enumerate(fragments))
    if not all(layout.size for layout in layouts):
        raise _too_many(len(layouts), sum(1 for layout in layouts if layout.size))
    return layouts


def _pieces(parts: Sequence[_Part]) -> tuple[Piece, ...]:
    """The parts in name and row order, back to back; neighbouring rows of one tensor are one piece."""
    joined: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.name, part.start)):
        if joined and joined[-1].name == part.name and joined[-1].stop == part.start:
            joined[-1] = _Part(part.name, joined[-1].start, part.stop, part.tensor)
        else:
            joined.append(part)
    offsets = accumulate((part.elements for part in joined), initial=0)
    return tuple(_piece(part, offset) for part, offset in zip(joined, offsets, strict=False))


def _piece(part: _Part, offset: int) -> Piece:
    tensor = part.tensor
    if part.start == 0 and part.stop == _rows(tensor):
        return Piece(tensor.name, tensor.shape, offset, None, tensor.role)
    rows = (part.start, part.stop)
    return Piece(tensor.name, (part.stop - part.start, *tensor.shape[1:]), offset, rows, tensor.role)


def _too_many(fragments: int, filled: int) -> ConfigurationError:
    return ConfigurationError(
        f"The model fills {filled} of {fragments} fragments: a fragment needs at least one row of a tensor.",
        "Use fewer fragments.",
    )
