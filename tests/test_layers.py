"""Imports go one way, and the core runs where no training framework is installed."""

import ast
import gc
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core" / "gradientmail_core"
FRAMEWORKS = ("accelerate", "jax", "lightning", "mlx", "mlx_lm", "pytorch_lightning", "torch", "transformers")

IMPORT_WITHOUT_FRAMEWORKS = """
import importlib, pkgutil, sys
for framework in {frameworks!r}:
    sys.modules[framework] = None
import gradientmail_core
for module in pkgutil.walk_packages(gradientmail_core.__path__, "gradientmail_core."):
    if not module.name.startswith("gradientmail_core.adapters.") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def test_contracts_hold() -> None:
    lint = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    run = subprocess.run([sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[run.stdout.find("Contracts") :] + run.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_only_adapters_name_a_framework(framework: str) -> None:
    gc.collect()  # CPython 3.11 fails to parse if a collection runs Python code in the middle of it
    importing = [
        str(path.relative_to(ROOT))
        for path in CORE.rglob("*.py")
        if CORE / "adapters" not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if framework in imported_roots(node)
    ]
    assert not importing


def imported_roots(node: ast.AST) -> set[str]:
    """The top-level packages that a statement imports."""
    match node:
        case ast.Import(names=names):
            return {alias.name.partition(".")[0] for alias in names}
        case ast.ImportFrom(module=str(module), level=0):
            return {module.partition(".")[0]}
        case _:
            return set()


def test_every_core_module_imports_without_frameworks() -> None:
    program = IMPORT_WITHOUT_FRAMEWORKS.format(frameworks=FRAMEWORKS)
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
