"""``gradientmail COMMAND``: hands the rest of the line to the package that brings the command.

A command is an entry point of the group :data:`GROUP`, a function from arguments to an exit code. So the core
offers commands of packages it knows nothing of, and loads only the one that was asked for. Whatever goes wrong in
a way the library foresees is said in a sentence: exit code 2 for a line that cannot be understood, 1 for a
:class:`GradientMailError`, 130 for Ctrl-C; a stack trace is left to defects.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Final, TypeAlias

from gradientmail_core.errors import GradientMailError

Command: TypeAlias = Callable[[Sequence[str]], int]

GROUP: Final = "gradientmail.commands"
DISTRIBUTION: Final = "gradientmail"
INSTALL: Final = "pip install '.[all]' in a clone of the project"

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: the process's arguments) names; its exit code."""
    commands = installed_commands()
    parser = _parser(commands)
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help(sys.stderr)
        return MISUSED
    entry = commands.get(options.command)
    if entry is None:
        return _refuse(_unknown(options.command, commands))
    try:
        command: Command = entry.load()
    except ModuleNotFoundError as error:
        return _refuse(f"{entry.name!r} needs the package {error.name}, which is not installed. Run: {INSTALL}")
    try:
        return command(options.arguments)
    except GradientMailError as error:
        print(f"gradientmail {entry.name}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def installed_commands() -> dict[str, EntryPoint]:
    """Every command that an installed package brings, by name."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def _parser(commands: Mapping[str, EntryPoint]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradientmail",
        description="Train one model on machines that share nothing but an object store.",
        epilog="gradientmail COMMAND --help says what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"gradientmail {version(DISTRIBUTION)}")
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", help=", ".join(commands) or f"none is installed: {INSTALL}"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the command takes")
    return parser


def _unknown(name: str, commands: Mapping[str, EntryPoint]) -> str:
    known = ", ".join(commands) or "none"
    return f"There is no command {name!r} among those installed ({known}). If the name is right, run: {INSTALL}"


def _refuse(sentence: str) -> int:
    print(f"gradientmail: {sentence}", file=sys.stderr)
    return MISUSED


if __name__ == "__main__":
    sys.exit(main())
