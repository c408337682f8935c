"""What a model is to a run: named tensors with shapes, cut into fragments with a flat layout.

A schema holds no framework type and no dtype: the committed parameters are fp32 masters whatever a
node computes in, so a bf16 node and an fp32 node share a digest. A fragment is a flat fp32 buffer;
its layout says which rows of which tensor lie where. Everything the store will ever hold for a
fragment (names, shapes, sizes, offsets) follows from the layout, so what arrives is compared with it
and never trusted.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

Role: TypeAlias = Literal["matrix", "embedding", "head", "vector", "buffer"]
"""A tensor's part in the model; a buffer (a BatchNorm's statistics) is averaged, and no optimizer moves it."""

ROLES: Final[tuple[str, ...]] = get_args(Role)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that is merged: canonical name, shape (elements per dimension), and its part in the model."""

    name: str
    shape: tuple[int, ...]
    role: Role = "matrix"

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Schema:
    """All trainable tensors of a model, in name order."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec]) -> "Schema":
        """A schema of ``tensors`` in canonical (name) order."""
        return cls(tuple(sorted(tensors, key=lambda tensor: tensor.name)))

    @property
    def elements(self) -> int:
        """Parameters in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def digest(self) -> str:
        """sha256 of names and shapes in canonical JSON: equal on every node that can train together."""
        canonical = json.dumps(
            [[tensor.name, list(tensor.shape)] for tensor in self.tensors], separators=(",", ":"), ensure_ascii=True
        )
        return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one tensor in a fragment's flat buffer.

    ``rows`` is None for a whole tensor, else the half-open range of first-dimension indices;
    ``shape`` is that of the piece; ``offset`` counts elements from the start of the buffer.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    rows: tuple[int, int] | None = None
    role: Role = "matrix"

    @property
    def elements(self) -> int:
        """Number of elements of the piece."""
        return math.prod(self.shape)

    @property
    def key(self) -> str:
        """The piece's name in a payload: the tensor's, with its row range when it is a part."""
        return self.name if self.rows is None else f"{self.name}[{self.rows[0]}:{self.rows[1]}]"


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """One fragment: its number and its pieces, back to back in the order of their offsets."""

    fragment: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Elements of the flat buffer."""
        return sum(piece.elements for piece in self.pieces)


def schema_difference(ours: Schema, theirs: Schema) -> list[str]:
    """One line for each tensor that is missing, extra or of another shape, ours against the run's."""
    mine = {tensor.name: tensor.shape for tensor in ours.tensors}
    run = {tensor.name: tensor.shape for tensor in theirs.tensors}
    absent, added = sorted(run.keys() - mine.keys()), sorted(mine.keys() - run.keys())
    missing = [f"- {name} {list(run[name])} (in the run, not in this model)" for name in absent]
    extra = [f"+ {name} {list(mine[name])} (in this model, not in the run)" for name in added]
    shapes = [
        f"! {name} {list(mine[name])} here, {list(run[name])} in the run"
        for name in sorted(mine.keys() & run.keys())
        if mine[name] != run[name]
    ]
    return missing + extra + shapes
