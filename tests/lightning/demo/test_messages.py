"""Messages survive their line, and other output is no message."""

import pytest

from gradientmail_lightning.demo.messages import Ended, Evaluated, Message, Said, Started, Stepped, from_line, to_line


@pytest.mark.parametrize(
    "message", [Started(3), Stepped(5, 1.5, 2.25, 2, 10, 99), Evaluated(5, 1.5, 2.5), Said("b is gone"), Ended(9, 4.0)]
)
def test_a_message_survives_its_line(message: Message) -> None:
    assert from_line(to_line(message) + "\n") == message


@pytest.mark.parametrize("line", ["", "GPU available: False", "[1]", '{"kind": "no"}', '{"kind": "said", "x": 1}', "{"])
def test_other_output_is_no_message(line: str) -> None:
    assert from_line(line) is None
