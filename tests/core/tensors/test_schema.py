import hashlib
import math

from gradientmail_core.tensors.schema import FragmentLayout, Piece, Schema, TensorSpec, schema_difference

WEIGHT = TensorSpec("weight", (3, 4))
BIAS = TensorSpec("bias", (3,), "vector")
SCALE = TensorSpec("scale", (), "vector")


def test_the_digest_does_not_depend_on_the_order_of_tensors() -> None:
    assert Schema.of([WEIGHT, BIAS]).digest == Schema.of([BIAS, WEIGHT]).digest
    assert [tensor.name for tensor in Schema.of([WEIGHT, BIAS]).tensors] == ["bias", "weight"]


def test_the_digest_tells_names_and_shapes_apart_and_nothing_else() -> None:
    digest = Schema.of([WEIGHT]).digest
    assert Schema.of([TensorSpec("weight", (4, 3))]).digest != digest
    assert Schema.of([TensorSpec("Weight", (3, 4))]).digest != digest
    assert Schema.of([TensorSpec("weight", (3, 4), "head")]).digest == digest


def test_the_digest_is_the_same_for_ever() -> None:
    canonical = b'[["bias",[3]],["scale",[]],["weight",[3,4]]]'
    assert Schema.of([WEIGHT, BIAS, SCALE]).digest == hashlib.sha256(canonical).hexdigest()


def test_a_scalar_is_one_element() -> None:
    assert SCALE.elements == 1
    assert Schema.of([WEIGHT, BIAS, SCALE]).elements == 16


def test_an_empty_tensor_has_no_elements() -> None:
    assert TensorSpec("none", (0, 7)).elements == 0


def test_a_piece_of_rows_says_which() -> None:
    whole = Piece("weight", (3, 4), 0)
    part = Piece("weight", (2, 4), 12, rows=(1, 3))
    assert (whole.key, part.key) == ("weight", "weight[1:3]")
    assert FragmentLayout(0, (whole, part)).size == math.prod((3, 4)) + math.prod((2, 4))


def test_equal_schemas_have_no_difference() -> None:
    assert schema_difference(Schema.of([WEIGHT, BIAS]), Schema.of([BIAS, WEIGHT])) == []


def test_a_difference_names_missing_extra_and_reshaped_tensors() -> None:
    ours = Schema.of([TensorSpec("weight", (4, 3)), SCALE])
    theirs = Schema.of([WEIGHT, BIAS])
    assert schema_difference(ours, theirs) == [
        "- bias [3] (in the run, not in this model)",
        "+ scale [] (in this model, not in the run)",
        "! weight [4, 3] here, [3, 4] in the run",
    ]
