"""The manifest's plan: any partition comes back as it was, and only a plan that holds each element once is a plan."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_core.algorithms.partition import ByBytes, Partition, Strided
from gradientmail_core.protocol.fields import Rejected
from gradientmail_core.protocol.plan import manifest_layouts, manifest_schema, plan_rows, schema_rows
from gradientmail_core.protocol.records import Manifest, parse_manifest
from gradientmail_core.tensors.schema import FragmentLayout, Schema, TensorSpec
from tests.core.protocol.records import MANIFEST

SCHEMAS = st.lists(
    st.builds(
        lambda number, rows, columns, role: TensorSpec(f"layers.{number}.weight", (rows, columns), role),
        st.integers(0, 40),
        st.integers(1, 30),
        st.integers(1, 5),
        st.sampled_from(["matrix", "embedding", "head", "vector"]),
    ),
    min_size=4,
    max_size=8,
    unique_by=lambda tensor: tensor.name,
).map(Schema.of)

Rows = tuple[tuple[tuple[str, int, int], ...], ...]


def manifest(schema: Schema, plan: Rows) -> Manifest:
    count = len(plan)
    return replace(
        MANIFEST, schema=schema_rows(schema), plan=plan, closers=("a",) * count, theta=MANIFEST.theta * count
    )


@given(SCHEMAS, st.integers(1, 4), st.sampled_from([ByBytes(), Strided()]))
@settings(deadline=None)
def test_partitions_come_back_through_the_manifest(schema: Schema, fragments: int, partition: Partition) -> None:
    layouts = partition.layouts(schema, fragments)
    found = parse_manifest(manifest(schema, plan_rows(layouts)).encoded())
    assert isinstance(found, Manifest)
    assert manifest_schema(found) == schema
    assert manifest_layouts(found) == layouts


def test_a_tensor_without_dimensions_is_one_element() -> None:
    schema = Schema.of([TensorSpec("scale", (), "vector"), TensorSpec("w", (2, 3))])
    found = manifest_layouts(manifest(schema, ((("scale", -1, -1),), (("w", 0, 1), ("w", 1, 2)))))
    assert not isinstance(found, Rejected)
    assert [layout.size for layout in found] == [1, 6]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (((("w", 0, 3),),), "the plan does not hold each row of 'v' once"),
        (((("w", -1, -1), ("v", -1, -1), ("w", 0, 1)),), "the plan does not hold each row of 'w' once"),
        (((("w", -1, -1), ("v", -1, -1)), (("v", -1, -1),)), "the plan does not hold each row of 'v' once"),
        (((("w", 0, 2), ("w", 1, 3), ("v", -1, -1)),), "the plan does not hold each row of 'w' once"),
        (((("w", 0, 1), ("w", 2, 3), ("v", -1, -1)),), "the plan does not hold each row of 'w' once"),
        (((("w", 0, 2), ("v", -1, -1)),), "the plan does not hold each row of 'w' once"),
        (((("w", 1, 3), ("v", -1, -1)),), "the plan does not hold each row of 'w' once"),
        (((("w", 0, 4), ("v", -1, -1)),), "the plan cuts 'w' outside its rows"),
        (((("w", 2, 2), ("v", -1, -1)),), "the plan cuts 'w' outside its rows"),
        (((("w", -1, 3), ("v", -1, -1)),), "the plan cuts 'w' outside its rows"),
        (((("u", -1, -1),),), "the plan names 'u', which is no tensor of the schema"),
    ],
)
def test_a_plan_that_does_not_cut_the_schema_is_refused(plan: Rows, reason: str) -> None:
    schema = Schema.of([TensorSpec("v", (2,)), TensorSpec("w", (3, 4))])
    assert manifest_layouts(manifest(schema, plan)) == Rejected(reason)


def test_a_tensor_without_dimensions_cannot_be_cut() -> None:
    schema = Schema.of([TensorSpec("scale", (), "vector")])
    assert isinstance(manifest_layouts(manifest(schema, ((("scale", 0, 1),),))), Rejected)


def test_a_tensor_that_occurs_twice_is_refused() -> None:
    twice = replace(MANIFEST, schema=MANIFEST.schema * 2)
    assert manifest_layouts(twice) == Rejected("a tensor occurs twice in the schema")


NAMES = st.sampled_from(["u", "v", "w"])
PLANS = st.lists(
    st.lists(st.tuples(NAMES, st.integers(-1, 4), st.integers(-1, 4)), min_size=1, max_size=3).map(tuple),
    min_size=1,
    max_size=3,
).map(tuple)
SMALL = st.lists(
    st.tuples(NAMES, st.lists(st.integers(0, 3), max_size=2).map(tuple), st.just("matrix")), max_size=3
).map(tuple)


@given(SMALL, PLANS)
@settings(deadline=None, max_examples=300)
def test_an_accepted_plan_holds_each_element_once(
    schema: tuple[tuple[str, tuple[int, ...], str], ...], plan: Rows
) -> None:
    count = len(plan)
    strange = replace(MANIFEST, schema=schema, plan=plan, closers=("a",) * count, theta=MANIFEST.theta * count)
    found = manifest_layouts(strange)
    if not isinstance(found, Rejected):
        assert elements(found) == sum(prod(shape) for _, shape, _ in schema)


def elements(layouts: tuple[FragmentLayout, ...]) -> int:
    for layout in layouts:
        assert [piece.offset for piece in layout.pieces] == [
            sum(before.elements for before in layout.pieces[:index]) for index in range(len(layout.pieces))
        ]
    return sum(layout.size for layout in layouts)
