"""Finished trials, one JSON object a line, in files that are committed: appended to, never rewritten."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar


class Described(Protocol):
    """A trial, whose settings are a row's name."""

    def fields(self) -> dict[str, object]:
        """The settings as JSON."""
        ...


T = TypeVar("T", bound=Described)

LOGS = Path(__file__).parent / "logs"

Row = dict[str, object]


def path_of(study: str) -> Path:
    """Where a study's rows are."""
    return LOGS / f"{study}.jsonl"


def read(path: Path) -> list[Row]:
    """The rows of a log, none if there is no file; a last line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append(path: Path, row: Row) -> None:
    """Add a row, after cutting off an unfinished one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = path.read_bytes() if path.exists() else b""
    whole = body[: body.rfind(b"\n") + 1]
    if whole != body:
        path.write_bytes(whole)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def missing(trials: Iterable[T], rows: Iterable[Row]) -> list[T]:
    """The trials without a row of exactly their settings."""
    done = {json.dumps(row["trial"], sort_keys=True) for row in rows}
    return [trial for trial in trials if json.dumps(trial.fields(), sort_keys=True) not in done]
