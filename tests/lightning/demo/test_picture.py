"""The picture is a PNG of the promised size, and marks lie on their curve."""

import struct
from pathlib import Path

import pytest

from gradientmail_lightning.demo.picture import draw, loss_at
from gradientmail_lightning.demo.results import Mark, Point
from tests.lightning.demo.outcomes import RESULTS


def test_picture_is_a_png_of_the_promised_size(tmp_path: Path) -> None:
    draw(RESULTS, 2, tmp_path / "demo.png")
    content = (tmp_path / "demo.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1800, 840)


def test_marks_lie_on_their_curve_on_both_axes() -> None:
    curve = (Point(0, 0.0, 3.0), Point(10, 4.0, 1.0))
    mark = Mark("kill", "b", 7, step=5, seconds=1.0)
    assert loss_at(curve, mark, lambda at: at.step) == pytest.approx(2.0)
    assert loss_at(curve, mark, lambda at: at.seconds) == pytest.approx(2.5)
    assert loss_at(curve, Mark("kill", "b", 7, step=99, seconds=99.0), lambda at: at.step) == 1.0
