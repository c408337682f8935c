"""The picture is a PNG of the promised size, and marks lie on their curve."""

import struct
from pathlib import Path

import pytest

from gradientmail_lightning.demo.picture import draw, loss_at
from gradientmail_lightning.demo.results import Point
from tests.lightning.demo.outcomes import RESULTS


def test_picture_is_a_png_of_the_promised_size(tmp_path: Path) -> None:
    draw(RESULTS, 2, tmp_path / "demo.png")
    content = (tmp_path / "demo.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1800, 840)


def test_loss_between_points_is_on_the_line() -> None:
    curve = (Point(0, 0.0, 3.0), Point(10, 1.0, 1.0))
    assert loss_at(curve, 5) == pytest.approx(2.0)
    assert loss_at(curve, 99) == 1.0
