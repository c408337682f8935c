"""The documents: their figures are those of the committed logs, their links lead somewhere, their code parses."""

import ast
import json
import re
from pathlib import Path

import pytest

from docs import quote
from gradientmail_lightning.demo.report import Setup, as_json
from gradientmail_lightning.demo.results import Outcome, Results
from gradientmail_lightning.demo.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [str(path.relative_to(ROOT)) for path in quote.documents()]


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_logs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == quote.filled(text), "run: python -m docs.quote"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_name_what_exists(page: str) -> None:
    for example in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
        imports: list[ast.stmt] = [
            node for node in ast.parse(example).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        exec(compile(ast.Module(imports, []), page, "exec"), {})


@pytest.mark.parametrize("target", re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
def test_targets_that_the_readme_names_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_a_place_without_a_log_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quote, "RESULTS", tmp_path)
    place = "<!-- figures: kernels -->\nold\n<!-- end -->"
    assert "Not measured yet" in quote.filled(place)


def test_a_place_is_filled_from_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quote, "RESULTS", tmp_path)
    rows = [{"name": "nesterov_step", "gb_per_s": 12.5, "copy_ratio": 1.75, "seconds": 0.1}]
    (tmp_path / "kernels.json").write_text(json.dumps({"rows": rows}))
    text = quote.filled("before\n<!-- figures: kernels -->\nold\n<!-- end -->\nafter")
    assert "| `nesterov_step` | 12.50 | 1.75 |" in text
    assert text.startswith("before\n<!-- figures: kernels -->\n|")
    assert text.endswith("|\n<!-- end -->\nafter")
    assert quote.filled(text) == text


def test_the_demo_table_is_that_of_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quote, "RESULTS", tmp_path)
    alone = Outcome(seed=3, loss=2.25, seconds=9.0, curve=(), steps={"a": 450})
    merged = Outcome(seed=3, loss=2.125, seconds=9.0, curve=(), steps={"a": 450, "b": 450})
    figures = as_json(Setup(Settings(), 2, 1_000_000, "memory://x"), Results((alone,), (merged,), merged, 60.0))
    (tmp_path / "demo.json").write_text(json.dumps(figures))
    text = quote.rendered("demo")
    assert "| 3 | 2.250 | 2.125 |" in text
    assert "2 nodes merged" in text
    assert "Nesterov (lr 0.7, momentum 0.9, warmup 10)" in text
