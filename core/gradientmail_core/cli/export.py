"""``gradientmail export URL TARGET``: what a run committed last, as one safetensors file.

Needs no training framework and no part in the run. Tensors have the names they have in the bare model, so that
``model.load_state_dict`` and ``from_pretrained`` take the file; of weights that are tied only one is in it, and
parameters that were frozen are not. The file is there whole or not at all.

A package may bring a format of its own, as an entry point of the group :data:`GROUP`: a function that writes the
committed tensors to a folder, in the shape that another folder describes. ``--hf CONFIG_DIR`` is such a one.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gradientmail_core.cli.console import Console
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.session.aligning import Committed, committed
from gradientmail_core.tensors.payload import encode_tensors

Format: TypeAlias = Callable[[Committed, Path, Path], None]

GROUP: Final = "gradientmail.exports"
DTYPES: Final[dict[str, DTypeLike]] = {"F32": np.float32, "F16": np.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file that ``argv`` names; the exit code. Raises :class:`GradientMailError` for what cannot be."""
    formats = installed_formats()
    options = _parser(formats).parse_args(argv)
    chosen = [(formats[name], folder) for name in formats if (folder := getattr(options, name)) is not None]
    if not options.target.parent.is_dir():
        raise ConfigurationError(f"There is no directory {options.target.parent}.", "Make it first.")
    if chosen:
        entry, described_by = chosen[0]
        written: Format = entry.load()
        found = committed(options.url)
        written(found, options.target, described_by)
    else:
        found = committed(options.url)
        write(found, options.target, DTYPES[options.dtype])
    elements = sum(tensor.size for tensor in found.tensors.values())
    amount = f"{len(found.tensors)} tensors, {elements:,} values"
    Console(sys.stdout).line(f"Run {found.run[:8]} at step {found.step}: {amount} in {options.target}")
    return 0


def write(found: Committed, path: Path, dtype: DTypeLike = np.float32) -> None:
    """Write ``found`` to ``path``. Raises :class:`ConfigurationError` if the file cannot be written."""
    arrays: dict[str, NDArray[np.generic]] = {
        name: tensor.astype(dtype, copy=False) for name, tensor in found.tensors.items()
    }
    body = encode_tensors(arrays, {"format": "pt", "gradientmail_run": found.run, "gradientmail_step": str(found.step)})
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(body)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.", "Use another file.") from error


def installed_formats() -> dict[str, EntryPoint]:
    """Every format that an installed package brings, by the name of its option."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def _parser(formats: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradientmail export", description="Write the newest committed parameters of a run to a safetensors file."
    )
    parser.add_argument("url", metavar="URL", help="the run's mailbox")
    parser.add_argument(
        "target", metavar="TARGET", type=Path, help="the file to write, or a folder with another format"
    )
    choice = parser.add_mutually_exclusive_group()
    for name in formats:
        choice.add_argument(
            f"--{name}",
            metavar="CONFIG_DIR",
            type=Path,
            help=f"write a folder of the {name} format, as CONFIG_DIR says",
        )
    parser.add_argument("--dtype", choices=DTYPES, default="F32", help="type of the values (default: %(default)s)")
    return parser
