"""One node as a process, alone: it reports its steps, its losses and its end."""

import subprocess
import sys

from gradientmail_lightning.demo.messages import Ended, Evaluated, Started, Stepped, from_line

SMALL = ["--steps=10", "--width=32", "--layers=1", "--batch=2", "--context=16", "--evaluate-every=5"]


def test_a_node_alone_reports_until_its_end() -> None:
    command = [sys.executable, "-m", "gradientmail_lightning.demo.node", "--name=a", "--curve", *SMALL]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    messages = [message for line in result.stdout.splitlines() if (message := from_line(line)) is not None]
    assert isinstance(messages[0], Started) and isinstance(messages[-1], Ended)
    assert [message.step for message in messages if isinstance(message, Stepped)] == [5, 10]
    assert [message.step for message in messages if isinstance(message, Evaluated)] == [5, 10]


def test_a_bad_mailbox_is_said_in_a_sentence() -> None:
    command = [sys.executable, "-m", "gradientmail_lightning.demo.node", "--name=a", "--mailbox=gopher://x", *SMALL]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 1
    assert "gopher" in result.stderr and "Traceback" not in result.stderr
