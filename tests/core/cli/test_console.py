"""Lines stay; progress is written over, and only on a terminal."""

import io

from gradientmail_core.cli.console import CLEAR, Console


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_lines_only() -> None:
    out = io.StringIO()
    console = Console(out)
    console.progress("half done")
    console.line("done")
    assert out.getvalue() == "done\n"


def test_a_terminal_sees_progress_and_then_the_line_in_its_place() -> None:
    out = Screen()
    console = Console(out)
    console.progress("half done")
    console.line("done")
    assert out.getvalue() == f"{CLEAR}  half done …{CLEAR}done\n"
