"""Residuals in a checkpoint: bit for bit at their own commit and codec, and nothing anywhere else."""

import numpy as np
import pytest

from gradientmail_core.engine.residuals import LeftOver, left_over, left_over_json, parse_left_over, taken_up
from gradientmail_core.protocol.fields import FieldRefused
from gradientmail_core.tensors.error_feedback import Feedback, Pending, Residual

HERE, ELSEWHERE = "a" * 64, "b" * 64
EXACT = Residual(np.array([1.5, -0.0, 3e-30], np.float32))
NARROW = Residual(np.array([1, 65535, 7], np.uint16))


@pytest.mark.parametrize("residual", [EXACT, NARROW])
def test_values_come_back_bit_for_bit(residual: Residual) -> None:
    feedback = Feedback("INT4", residual, Pending("c" * 64, Residual()))
    kept = parse_left_over(left_over_json(left_over(feedback, HERE)))
    on = taken_up(kept, Feedback("INT4"), HERE, 3)
    assert on.settled.values is not None and residual.values is not None and on.pending is None
    assert on.settled.values.dtype == residual.values.dtype
    assert on.settled.values.tobytes() == residual.values.tobytes()


@pytest.mark.parametrize(("record", "codec", "size"), [(ELSEWHERE, "INT4", 3), (HERE, "INT2", 3), (HERE, "INT4", 4)])
def test_another_commit_codec_or_size_starts_from_zero(record: str, codec: str, size: int) -> None:
    fresh = Feedback(codec)
    assert taken_up(LeftOver(HERE, "INT4", EXACT), fresh, record, size) is fresh


def test_nothing_is_kept_of_zeros_and_without_feedback() -> None:
    assert left_over(None, HERE) is None and left_over(Feedback("INT4"), HERE) is None
    assert left_over_json(None) is None and parse_left_over(None) is None


@pytest.mark.parametrize(
    "change", [{"dtype": "F64"}, {"values": "?"}, {"values": "AAA="}, {"record": "x"}, {"codec": 4}]
)
def test_anything_else_is_refused(change: dict[str, object]) -> None:
    honest = left_over_json(LeftOver(HERE, "INT4", EXACT))
    assert honest is not None
    with pytest.raises(FieldRefused):
        parse_left_over(honest | change)
