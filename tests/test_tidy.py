"""The rules of the house, each one test: sizes, docstrings, names, and what no source may contain.

They are read off the syntax trees of the tracked files, so a rule says where it is broken and why it
stands. Words that would break a rule here are put together from halves.
"""

import ast
import functools
import re
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = "core/gradientmail_core"
PLUGINS = ("gradientmail_lightning", "gradientmail_hf", "gradientmail_mlx")
LIBRARY = (CORE, *PLUGINS)

MAX_FUNCTION_LINES = 70
MAX_MEDIAN_FUNCTION_LINES = 7
MAX_FILE_LINES = 600
MAX_ANY_PER_THOUSAND_LINES = 1.0

# A dataclass that may change after it is made, and why.
MUTABLE_DATACLASSES = {
    "SimulatedGossip": "a process of the simulation, which starts, fails and starts again",
    "SimulatedNode": "a process of the simulation, which starts, fails and starts again",
    "Traffic": "counts of one simulated line, added to with every request",
    "Board": "what one node has seen so far; written by its engine's thread only",
}

# A module, or a folder of modules, without test files of their own, and where they are tested instead.
TESTED_ELSEWHERE = {
    f"{CORE}/errors.py": "declarations; each error is raised in the tests of the module that raises it",
    f"{CORE}/mailbox/base.py": "a protocol; tests/core/mailbox/test_contract.py holds every mailbox to it",
    f"{CORE}/mailbox/surroundings.py": "a protocol; tests of objectstore/bucket and directory hold mailboxes to it",
    f"{CORE}/tensors/parts.py": "a protocol; tests/core/tensors/test_codecs.py holds every codec to it",
    f"{CORE}/tensors/model.py": "a protocol; tests/core/adapters holds adapters to it",
}

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "torch.load", "yaml.load", "numpy.load", "np.load", "os.system"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A tracked Python file: its path from the root, its text, and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    def under(self, *folders: str) -> bool:
        """Whether the file lies in one of ``folders``."""
        return self.path.startswith(tuple(f"{folder}/" for folder in folders))


@functools.cache
def tracked() -> tuple[str, ...]:
    """The project's own files: what git tracks, or everything here where there is no git."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = (
        listing.stdout.split("\0") if listing.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    )
    return tuple(name for name in names if name and (ROOT / name).is_file())


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every tracked Python file."""
    paths = [name for name in tracked() if name.endswith(".py")]
    texts = [(path, (ROOT / path).read_text(encoding="utf-8")) for path in paths]
    return tuple(Source(path, text, ast.parse(text, path)) for path, text in texts)


def library() -> list[Source]:
    """What a user installs."""
    return [source for source in sources() if source.under(*LIBRARY)]


def core() -> list[Source]:
    """The framework-agnostic part."""
    return [source for source in sources() if source.under(CORE)]


def functions(source: Source) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(source.tree) if isinstance(node, Function))


def body_lines(function: Function) -> int:
    """Lines from the first statement after the docstring to the last."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (statements[-1].end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def holds(breaches: list[str], rule: str) -> None:
    """Fail with the rule and every place that breaks it."""
    assert not breaches, "\n  ".join([f"{rule}:", *breaches])


def classes(source: Source) -> Iterator[ast.ClassDef]:
    """Every class."""
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef))


def dotted(node: ast.expr) -> str:
    """``a.b.c`` for a name or attribute, an empty string for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
        case ast.Call(func=function):
            return dotted(function)
        case _:
            return ""


def test_functions_are_short() -> None:
    long = [
        f"{source.path}:{function.lineno} {function.name}: {body_lines(function)} lines"
        for source in sources()
        for function in functions(source)
        if body_lines(function) > MAX_FUNCTION_LINES
    ]
    holds(long, f"longer than {MAX_FUNCTION_LINES} lines")


def test_the_median_function_is_a_few_lines() -> None:
    median = statistics.median(body_lines(function) for source in library() for function in functions(source))
    assert median <= MAX_MEDIAN_FUNCTION_LINES


def test_files_are_short() -> None:
    long = [
        f"{source.path}: {len(source.text.splitlines())} lines"
        for source in sources()
        if len(source.text.splitlines()) >= MAX_FILE_LINES
    ]
    holds(long, f"{MAX_FILE_LINES} lines or more")


def test_every_module_says_what_it_promises() -> None:
    silent = [
        source.path
        for source in sources()
        if source.text.strip() and not source.under("tests") and ast.get_docstring(source.tree) is None
    ]
    holds(silent, "modules without a docstring")


def public_definitions(source: Source) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Public functions, classes and methods with their qualified names; nothing nested in a function."""
    waiting: list[tuple[str, ast.Module | ast.ClassDef]] = [("", source.tree)]
    while waiting:
        prefix, parent = waiting.pop()
        for node in parent.body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                yield prefix + node.name, node
                if isinstance(node, ast.ClassDef):
                    waiting.append((f"{prefix}{node.name}.", node))


def is_protocol(definition: ast.ClassDef) -> bool:
    """Whether the class is an interface, whose docstrings speak for those who implement it."""
    return any(dotted(base).rpartition(".")[2] in {"Protocol", "ABC"} for base in definition.bases)


def documented_by_protocol() -> set[str]:
    """Methods that an interface in the library documents: an implementation need not say it again."""
    return {
        node.name
        for source in library()
        for definition in classes(source)
        if is_protocol(definition)
        for node in definition.body
        if isinstance(node, Function) and ast.get_docstring(node)
    }


def test_every_public_name_is_documented() -> None:
    inherited = documented_by_protocol()
    silent = [
        f"{source.path}:{node.lineno} {name}"
        for source in library()
        for name, node in public_definitions(source)
        if ast.get_docstring(node) is None
        and not ("." in name and node.name in inherited)
        and not any(
            dotted(decorator).endswith((".setter", "overload", "override")) for decorator in node.decorator_list
        )
    ]
    holds(silent, "public names without a docstring")


def test_any_is_rare() -> None:
    used = [
        f"{source.path}:{node.lineno}"
        for source in library()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Name) and node.id == "Any"
    ]
    thousands = sum(len(source.text.splitlines()) for source in library()) / 1000
    assert len(used) <= MAX_ANY_PER_THOUSAND_LINES * max(thousands, 1), used


def test_dataclasses_are_frozen() -> None:
    mutable = [
        f"{source.path}:{definition.lineno} {definition.name}"
        for source in core()
        for definition in classes(source)
        for decorator in definition.decorator_list
        if dotted(decorator).rpartition(".")[2] == "dataclass"
        and "frozen=True" not in ast.unparse(decorator)
        and definition.name not in MUTABLE_DATACLASSES
    ]
    holds(mutable, "state is frozen and moved by functions; an exception is listed with its reason")


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that the file imports."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def test_nothing_that_runs_what_it_reads() -> None:
    imports = [
        f"{source.path}:{line} import {name}"
        for source in library()
        for line, name in imported(source)
        if name.partition(".")[0] in FORBIDDEN_IMPORTS
    ]
    calls = [
        f"{source.path}:{node.lineno} {dotted(node.func)}"
        for source in library()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS
    ]
    holds(imports + calls, "what is read from elsewhere is data, never code")


def test_no_wait_blocks_the_event_loop() -> None:
    sleeps = [
        f"{source.path}:{node.lineno} {dotted(node.func)}"
        for source in core()
        if source.under(*(f"{CORE}/{layer}" for layer in ("engine", "protocol", "algorithms")))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and dotted(node.func) in {"time.sleep", "asyncio.sleep", "time.time", "time.monotonic"}
    ]
    holds(sleeps, "time comes from the injected clock")


def test_names_say_what_a_thing_is() -> None:
    vague = re.compile("(?i)" + "manager|" + "helper|" + "utils?$|" + "utils?_")
    named = [
        f"{source.path}:{node.lineno} {node.name}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, Function | ast.ClassDef) and vague.search(node.name)
    ]
    files = [source.path for source in sources() if vague.search(Path(source.path).stem)]
    holds(named + files, "names that could mean anything")


def texts() -> Iterator[tuple[str, int, str]]:
    """Path, number and text of every line of every tracked text file."""
    for name in tracked():
        try:
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        yield from ((name, number, line) for number, line in enumerate(lines, 1))


def test_no_marks_of_unfinished_work() -> None:
    marks = re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|X" + "XX)" + r"\b")
    found = [f"{name}:{number}" for name, number, line in texts() if marks.search(line)]
    holds(found, "finish it, or file it")


def test_no_path_of_one_machine() -> None:
    private = re.compile(r"(?<![\w.])/(" + "wo" + "rk|ro" + "ot|ho" + r"me/\w+)/" + r"|\." + r"library\b")
    found = [f"{name}:{number} {line.strip()[:80]}" for name, number, line in texts() if private.search(line)]
    holds(found, "paths that only one machine has")


def has_code(source: Source) -> bool:
    """Whether the file defines a function or class."""
    return any(isinstance(node, Function | ast.ClassDef) for node in source.tree.body)


def mirror(path: str) -> str:
    """Where the tests of a library module belong."""
    folders = path.replace(CORE, "core", 1) if path.startswith(CORE) else path.replace("gradientmail_", "", 1)
    module = Path(folders)
    return str(Path("tests") / module.parent / f"test_{module.stem}.py")


@pytest.mark.parametrize("package", LIBRARY)
def test_tests_mirror_modules(package: str) -> None:
    untested = [
        f"{source.path}: no {mirror(source.path)}"
        for source in library()
        if source.under(package)
        and has_code(source)
        and not source.path.startswith(tuple(TESTED_ELSEWHERE))
        and mirror(source.path) not in tracked()
    ]
    holds(untested, "modules without tests of their own")


def test_exemptions_are_in_use() -> None:
    dataclasses = {definition.name for source in core() for definition in classes(source)}
    stale = [path for path in TESTED_ELSEWHERE if not (ROOT / path).exists() or mirror(path) in tracked()]
    assert not stale + [name for name in MUTABLE_DATACLASSES if name not in dataclasses], "exemptions nothing needs"
