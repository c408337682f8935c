"""The manifest's schema and plan, to layouts and back.

The plan says which rows of which tensors make each fragment, so nodes whose own partition code
differs still agree. A plan is accepted only if every element of every tensor is in exactly one
fragment.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gradientmail_core.protocol.fields import FieldRefused, Rejected, guarded
from gradientmail_core.protocol.records import Manifest
from gradientmail_core.tensors.schema import FragmentLayout, Piece, Schema, TensorSpec

WHOLE = (-1, -1)


def schema_rows(schema: Schema) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """The schema as the manifest writes it."""
    return tuple((tensor.name, tensor.shape, tensor.role) for tensor in schema.tensors)


def plan_rows(layouts: Sequence[FragmentLayout]) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """The layouts as the manifest writes them; a whole tensor has rows -1 to -1."""
    return tuple(
        tuple((piece.name, *(piece.rows if piece.rows is not None else WHOLE)) for piece in layout.pieces)
        for layout in layouts
    )


def manifest_schema(manifest: Manifest) -> Schema:
    """The run's schema."""
    rows = manifest.schema
    return Schema.of(TensorSpec(name, shape, role) for name, shape, role in rows)  # type: ignore[arg-type]  # read as such


def manifest_layouts(manifest: Manifest) -> tuple[FragmentLayout, ...] | Rejected:
    """One layout for each fragment, or why the plan does not cut the schema."""
    return guarded(lambda: _layouts(manifest))


def _layouts(manifest: Manifest) -> tuple[FragmentLayout, ...]:
    tensors = {tensor.name: tensor for tensor in manifest_schema(manifest).tensors}
    if len(tensors) != len(manifest.schema):
        raise FieldRefused("a tensor occurs twice in the schema")
    layouts = tuple(_layout(number, rows, tensors) for number, rows in enumerate(manifest.plan))
    _check_cover(tensors.values(), layouts)
    return layouts


def _layout(number: int, rows: Iterable[tuple[str, int, int]], tensors: dict[str, TensorSpec]) -> FragmentLayout:
    pieces: list[Piece] = []
    offset = 0
    for name, first, last in rows:
        if name not in tensors:
            raise FieldRefused(f"the plan names {name[:80]!r}, which is no tensor of the schema")
        piece = _piece(tensors[name], first, last, offset)
        pieces.append(piece)
        offset += piece.elements
    return FragmentLayout(number, tuple(pieces))


def _piece(tensor: TensorSpec, first: int, last: int, offset: int) -> Piece:
    if (first, last) == WHOLE:
        return Piece(tensor.name, tensor.shape, offset, None, tensor.role)
    if not tensor.shape or not 0 <= first < last <= tensor.shape[0]:
        raise FieldRefused(f"the plan cuts {tensor.name!r} outside its rows")
    return Piece(tensor.name, (last - first, *tensor.shape[1:]), offset, (first, last), tensor.role)


def _check_cover(tensors: Iterable[TensorSpec], layouts: Sequence[FragmentLayout]) -> None:
    cuts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for layout in layouts:
        for piece in layout.pieces:
            cuts[piece.name].append(piece.rows or (0, piece.shape[0] if piece.shape else 1))
    for tensor in tensors:
        edge = 0
        for first, last in sorted(cuts[tensor.name]):
            if first != edge:
                raise FieldRefused(f"the plan does not hold each row of {tensor.name!r} once")
            edge = last
        if edge != (tensor.shape[0] if tensor.shape else 1) and tensor.elements:
            raise FieldRefused(f"the plan does not hold each row of {tensor.name!r} once")
