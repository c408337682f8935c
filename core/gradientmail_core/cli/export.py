"""``gradientmail export URL FILE``: what a run committed last, as one safetensors file.

Needs no training framework and no part in the run. Tensors have the names they have in the bare model, so that
``model.load_state_dict`` and ``from_pretrained`` take the file; of weights that are tied only one is in it, and
parameters that were frozen are not. The file is there whole or not at all.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gradientmail_core.cli.console import Console
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.session.aligning import Committed, committed
from gradientmail_core.tensors.payload import encode_tensors

DTYPES: Final[dict[str, DTypeLike]] = {"F32": np.float32, "F16": np.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file that ``argv`` names; the exit code. Raises :class:`GradientMailError` for what cannot be."""
    options = _parser().parse_args(argv)
    if not options.file.parent.is_dir():
        raise ConfigurationError(f"There is no directory {options.file.parent}.", "Make it first.")
    found = committed(options.url)
    write(found, options.file, DTYPES[options.dtype])
    elements = sum(tensor.size for tensor in found.tensors.values())
    Console(sys.stdout).line(
        f"Run {found.run[:8]} at step {found.step}: {len(found.tensors)} tensors, {elements:,} values in {options.file}"
    )
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradientmail export", description="Write the newest committed parameters of a run to a safetensors file."
    )
    parser.add_argument("url", metavar="URL", help="the run's mailbox")
    parser.add_argument("file", metavar="FILE", type=Path, help="where to write")
    parser.add_argument("--dtype", choices=DTYPES, default="F32", help="type of the values (default: %(default)s)")
    return parser
