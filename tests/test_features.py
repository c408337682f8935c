"""The table of features names tests that exist, and says what is missing where it names none."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "features.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| what")
]
NAMED = sorted({row[1] for row in ROWS if row[1]})


def test_every_feature_has_a_test_or_is_called_missing() -> None:
    assert len(ROWS) > 40
    assert [row for row in ROWS if len(row) != 3 or not (row[1] or row[2])] == []


@pytest.mark.parametrize("name", NAMED)
def test_the_named_test_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert re.fullmatch(r"tests/([\w/]+/)?test_\w+\.py", path)
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    assert function in tests if function else tests
