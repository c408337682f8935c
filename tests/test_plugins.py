"""The table of the plugins' arguments says what their signatures say."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACES = {
    "Session": ("core/gradientmail_core/session/session.py", "Session.__init__"),
    "Lightning": ("gradientmail_lightning/strategy.py", "GradientMailMixin.__init__"),
    "Trainer": ("gradientmail_hf/callback.py", "GradientMailCallback.__init__"),
    "mlx-lm": ("gradientmail_mlx/training.py", "train"),
}


def arguments(path: str, name: str) -> set[str]:
    """What the function of that name takes, but ``self`` and ``**rest``."""
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text("utf-8")).body
    *classes, function = name.split(".")
    for owner in classes:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    names = {argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)}
    return names - {"self"}


def told() -> dict[str, dict[str, bool]]:
    """By argument, in which column the table has it."""
    page = (ROOT / "docs" / "plugins.md").read_text("utf-8")
    lines = [line.strip("|").split("|") for line in page.split("\n\n")[2].splitlines()]
    head = [cell.strip().strip("`") for cell in lines[0]]
    assert head[1:5] == list(PLACES)
    rows: dict[str, dict[str, bool]] = {}
    for names, *cells in lines[2:]:
        marks = {place: cell.strip() == "yes" for place, cell in zip(PLACES, cells, strict=False)}
        assert cells[4].strip() or all(marks.values()), f"{names} is missing somewhere, and nothing says why"
        rows.update(dict.fromkeys(re.findall(r"`(\w+)`", names), marks))
    return rows


def test_the_table_is_what_the_signatures_are() -> None:
    takes = {place: arguments(*where) for place, where in PLACES.items()}
    every = set().union(*takes.values())
    assert told() == {name: {place: name in names for place, names in takes.items()} for name in every}
