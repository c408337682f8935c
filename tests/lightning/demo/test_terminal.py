"""What a person sees, on a terminal and in a file."""

import io

from gradientmail_lightning.demo.messages import Stepped
from gradientmail_lightning.demo.terminal import Terminal, clock


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_lines_only() -> None:
    out = io.StringIO()
    terminal = Terminal(out)
    terminal.progress({"a": Stepped(5, 1.0, 2.0)})
    terminal.line("b is gone")
    assert out.getvalue() == "  00:00  b is gone\n"


def test_a_terminal_gets_progress_in_place() -> None:
    out = Tty()
    Terminal(out).progress({"a": Stepped(5, 1.0, 2.0, rounds=3)})
    assert out.getvalue().startswith("\r\x1b[2K") and "a 5 (loss 2.00)   round 3" in out.getvalue()


def test_clock() -> None:
    assert clock(187.9) == "03:07"
