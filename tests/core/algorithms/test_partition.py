"""Partitions hold every element once, balance what they can, and say when fragments cannot be filled."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradientmail_core.algorithms.partition import ByBytes, Partition, Strided, block_number
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.tensors.schema import FragmentLayout, Schema, TensorSpec

SHAPES = st.lists(st.integers(0, 12), max_size=3).map(tuple)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """A model of blocks and other tensors, with 0-d, empty and one-row shapes among them."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=12))
    names = [f"layers.{number // 3}.w{number % 3}" if number % 4 else f"head{number}" for number in range(len(shapes))]
    return Schema.of(TensorSpec(name, shape) for name, shape in zip(names, shapes, strict=True))


def transformer(width: int = 64, blocks: int = 6, vocabulary: int = 5000) -> Schema:
    """A decoder whose embedding is larger than all blocks together."""
    shapes = {"wte": (vocabulary, width), "ln_f": (width,)}
    for block in range(blocks):
        shapes |= {f"h.{block}.qkv": (width, 3 * width), f"h.{block}.out": (width, width), f"h.{block}.ln": (width,)}
    return Schema.of(TensorSpec(name, shape) for name, shape in shapes.items())


def assert_each_element_once(schema: Schema, layouts: tuple[FragmentLayout, ...]) -> None:
    counts = {tensor.name: np.zeros(tensor.shape, np.int64) for tensor in schema.tensors}
    for number, layout in enumerate(layouts):
        assert layout.fragment == number
        offset = 0
        for piece in layout.pieces:
            assert piece.offset == offset
            rows = counts[piece.name] if piece.rows is None else counts[piece.name][slice(*piece.rows)]
            assert rows.shape == piece.shape
            rows += 1
            offset += piece.elements
        assert layout.size == offset > 0
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("partition", [ByBytes(), Strided()], ids=repr)
@settings(deadline=None)
@given(schemas(), st.integers(1, 9))
def test_layouts_hold_each_element_once_or_say_that_they_cannot(
    partition: Partition, schema: Schema, fragments: int
) -> None:
    try:
        layouts = partition.layouts(schema, fragments)
    except ConfigurationError:
        assume(False)
        return
    assert len(layouts) == fragments
    assert_each_element_once(schema, layouts)
    assert layouts == partition.layouts(Schema.of(reversed(schema.tensors)), fragments)


@settings(deadline=None)
@given(schemas(), st.integers(1, 9))
def test_by_bytes_fills_as_many_fragments_as_there_are_rows(schema: Schema, fragments: int) -> None:
    rows = sum(tensor.shape[0] if tensor.shape else 1 for tensor in schema.tensors if tensor.elements)
    if fragments <= rows:
        ByBytes().layouts(schema, fragments)
    else:
        with pytest.raises(ConfigurationError):
            ByBytes().layouts(schema, fragments)


@settings(deadline=None)
@given(schemas(), st.integers(1, 9))
def test_by_bytes_is_balanced_to_one_part(schema: Schema, fragments: int) -> None:
    try:
        layouts = ByBytes().layouts(schema, fragments)
    except ConfigurationError:
        assume(False)
        return
    share = schema.elements / fragments
    longest_row = max(tensor.elements // max(tensor.shape[0], 1) if tensor.shape else 1 for tensor in schema.tensors)
    assert max(layout.size for layout in layouts) <= share + max(share, longest_row)


@pytest.mark.parametrize("fragments", [1, 2, 4, 8])
def test_a_huge_embedding_is_split_by_rows_and_balanced(fragments: int) -> None:
    schema = transformer()
    layouts = ByBytes().layouts(schema, fragments)
    assert_each_element_once(schema, layouts)
    assert max(layout.size for layout in layouts) <= 1.1 * schema.elements / fragments
    holding = [piece for layout in layouts for piece in layout.pieces if piece.name == "wte"]
    assert (len(holding) > 1) == (fragments > 1)


def test_tensors_that_fit_are_not_cut() -> None:
    layouts = ByBytes().layouts(Schema.of(TensorSpec(name, (10, 10)) for name in "abcd"), 2)
    assert [[piece.rows for piece in layout.pieces] for layout in layouts] == [[None, None], [None, None]]


def test_neighbouring_rows_become_one_piece() -> None:
    (layout,) = ByBytes().layouts(transformer(), 1)
    assert all(piece.rows is None for piece in layout.pieces)


def test_roles_follow_the_tensors() -> None:
    schema = Schema.of([TensorSpec("wte", (40, 4), "embedding"), TensorSpec("w", (4, 4))])
    pieces = [piece for layout in ByBytes().layouts(schema, 3) for piece in layout.pieces]
    assert {(piece.name, piece.role) for piece in pieces} == {("wte", "embedding"), ("w", "matrix")}


def test_strided_deals_blocks_round() -> None:
    layouts = Strided().layouts(transformer(blocks=6), 3)
    for layout in layouts:
        blocks = {number for piece in layout.pieces if (number := block_number(piece.name)) is not None}
        assert blocks == {layout.fragment, layout.fragment + 3}


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.12.mlp.up.weight", 12),
        ("transformer.h.0.ln_1.bias", 0),
        ("layers.3.experts.7.w1", 3),
        ("2.weight", 2),
        ("lm_head.weight", None),
        ("conv1d.weight", None),
    ],
)
def test_block_numbers_come_from_names(name: str, block: int | None) -> None:
    assert block_number(name) == block


@pytest.mark.parametrize("partition", [ByBytes(), Strided()], ids=repr)
@pytest.mark.parametrize("fragments", [0, -1, 10**9])
def test_fragments_that_cannot_be_filled_are_refused(partition: Partition, fragments: int) -> None:
    with pytest.raises(ConfigurationError):
        partition.layouts(transformer(), fragments)


def test_a_model_without_elements_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        ByBytes().layouts(Schema.of([TensorSpec("empty", (0, 3))]), 1)
