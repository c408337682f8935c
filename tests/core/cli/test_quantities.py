"""Numbers with units: read as people write them, refused with what would have been understood."""

import argparse

import pytest

from gradientmail_core.cli.quantities import bandwidth, bytes_text, count, count_text, positive, seconds, share


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (seconds, "90", 90.0),
        (seconds, "0.8s", 0.8),
        (seconds, "30ms", 0.03),
        (seconds, "1h", 3600.0),
        (bandwidth, "100Mbit", 12.5e6),
        (bandwidth, "1Gbit/s", 125e6),
        (bandwidth, "12 MB/s", 12e6),
        (count, "1.5B", 1_500_000_000),
        (count, "124M", 124_000_000),
        (count, "7", 7),
        (positive, "3", 3),
        (share, "0.5", 0.5),
    ],
)
def test_read(read, text, value) -> None:
    assert read(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (seconds, "soon"),
        (seconds, "-1s"),
        (seconds, "0"),
        (bandwidth, "100"),
        (bandwidth, "fast"),
        (count, "1.5X"),
        (count, "nan"),
        (positive, "0"),
        (positive, "two"),
        (share, "2"),
        (share, "half"),
    ],
)
def test_refused(read, text) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        read(text)


def test_written_with_the_unit_that_fits() -> None:
    assert [bytes_text(number) for number in (0, 999, 1500, 2.5e9)] == ["0 B", "999 B", "1.5 kB", "2.5 GB"]
    assert [count_text(number) for number in (7, 999_999, 1.5e9)] == ["7", "1 M", "1.5 B"]
