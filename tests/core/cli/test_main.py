"""The command line: sentences and exit codes, never a stack trace for what is foreseen."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest

from gradientmail_core.cli import main as cli
from gradientmail_core.errors import RunMismatch


def refusing(arguments: Sequence[str]) -> int:
    raise RunMismatch("The prefix is in use.", "Use another.")


def interrupted(arguments: Sequence[str]) -> int:
    raise KeyboardInterrupt


def counting(arguments: Sequence[str]) -> int:
    return len(arguments)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    module = __name__
    names = {name: f"{module}:{name}" for name in ("refusing", "interrupted", "counting")}
    names["missing"] = "no_such_package_at_all:main"
    entries = {name: EntryPoint(name, value, cli.GROUP) for name, value in names.items()}
    monkeypatch.setattr(cli, "installed_commands", lambda: entries)
    monkeypatch.setattr(EntryPoint, "load", lambda entry: globals().get(entry.name) or not_installed())


def not_installed() -> object:
    raise ModuleNotFoundError("no module", name="no_such_package_at_all")


@pytest.mark.usefixtures("commands")
def test_arguments_and_exit_code_are_passed_through() -> None:
    assert cli.main(["counting", "--flag", "x", "y"]) == 3


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("refusing", 1, "The prefix is in use. Use another."),
        ("interrupted", 130, "interrupted"),
        ("missing", 2, "no_such_package_at_all"),
        ("unheard", 2, "There is no command 'unheard'"),
    ],
)
def test_what_goes_wrong_is_a_sentence(name: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name]) == code
    assert said in capsys.readouterr().err


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "demo" in capsys.readouterr().err


def test_the_demo_is_installed() -> None:
    assert "demo" in cli.installed_commands()
