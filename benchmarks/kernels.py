"""The arithmetic of a round beside one memory copy: ``make bench-kernels [JSON=FILE] [ARGS='--rounds 9']``.

Each operation alternates with ``np.copyto`` (one thread) over as many fp32 values, in this one process, and both
medians are reported: a machine that slows down slows both. GB/s counts fp32 bytes of the fragment, once,
whatever an operation reads and writes; for the two zstd rows it counts the bytes of the bf16 payload. Deltas are
normal values with a scale of their own for every row of 1024, which makes their exponents about as compressible
as those of a language model's deltas after 60 steps of AdamW.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradientmail_core.algorithms.merge import Contribution, Rda
from gradientmail_core.algorithms.outer import Nesterov
from gradientmail_core.tensors.codecs import codec_named
from gradientmail_core.tensors.compression import compress, decompress
from gradientmail_core.tensors.encoded import InMemory
from gradientmail_core.tensors.kernels import thread_count
from gradientmail_core.tensors.model import Flat
from gradientmail_core.tensors.payload import Malformed
from gradientmail_core.tensors.schema import FragmentLayout, Piece

MI = 2**20
CODECS = {
    "bf16": "BF16", "f8": "F8_E4M3", "int8": "INT8", "f4": "F4", "int4": "INT4", "int2": "INT2",
    "topk": "TOPK(64/4096,INT2)",
}  # fmt: skip
COPY_RATIO_MOST = {"nesterov_step": 2.0, "rda_merge_8": 30.0}
GB_PER_S_LEAST = {
    "encode_bf16": 3.0, "encode_f8": 1.0, "decode_f8": 1.0, "encode_int8": 1.0, "decode_int8": 1.0, "encode_f4": 1.0,
    "decode_f4": 1.0, "encode_int4": 1.0, "decode_int4": 1.0, "encode_int2": 0.4, "encode_topk": 0.4,
    "shuffle_zstd": 1.2,
}  # fmt: skip
COMPRESSED_MOST = 0.69


@dataclass(frozen=True, slots=True)
class Operation:
    """What is timed: ``run`` on ``elements`` fp32 values; ``counted_bytes`` is what GB/s counts."""

    name: str
    elements: int
    counted_bytes: int
    run: Callable[[], object]
    compressed: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: seconds of the operation, and of the copies between."""

    name: str
    seconds: float
    copy_ratio: float
    gb_per_s: float
    compressed: float | None

    def fields(self) -> dict[str, object]:
        """The row as JSON."""
        fields: dict[str, object] = {
            "name": self.name,
            "seconds": self.seconds,
            "copy_ratio": self.copy_ratio,
            "gb_per_s": self.gb_per_s,
        }
        return fields if self.compressed is None else {**fields, "compression_ratio": self.compressed}

    def target(self) -> tuple[str, bool]:
        """The target as text, if there is one, and whether the row reaches it."""
        if self.name in COPY_RATIO_MOST:
            most = COPY_RATIO_MOST[self.name]
            return f"<= {most:g}x copy", self.copy_ratio <= most
        if self.name not in GB_PER_S_LEAST:
            return "", True
        least, text = GB_PER_S_LEAST[self.name], f">= {GB_PER_S_LEAST[self.name]:g} GB/s"
        if self.compressed is None:
            return text, self.gb_per_s >= least
        return f"{text}, <= {COMPRESSED_MOST}", self.gb_per_s >= least and self.compressed <= COMPRESSED_MOST


def deltas(elements: int, seed: int) -> Flat:
    """Normal values with a scale of its own for every row of 1024."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((elements // 1024, 1024), dtype=np.float32)
    rows *= np.exp2(rng.uniform(-13, -11, (len(rows), 1))).astype(np.float32)
    return rows.reshape(-1)


def outer_operation() -> Operation:
    """A Nesterov step over 64 Mi parameters."""
    theta, delta, momentum = (np.full(64 * MI, value, np.float32) for value in (1.0, 1e-3, 1e-3))
    optimizer = Nesterov()
    return Operation(
        "nesterov_step", theta.size, theta.nbytes, lambda: optimizer.step(theta, delta, (momentum,), version=20)
    )


def merge_operation() -> Operation:
    """Radial-directional averaging of eight fp32 deltas of 16 Mi, in 16 matrices."""
    layout = FragmentLayout(0, tuple(Piece(f"w{index}", (1024, 1024), index * MI) for index in range(16)))
    contributions = [_contribution(f"node{index}", deltas(layout.size, index)) for index in range(8)]
    merge = Rda()
    return Operation("rda_merge_8", layout.size, layout.size * 4, lambda: merge(contributions, layout))


def _contribution(node: str, values: Flat) -> Contribution:
    return Contribution(node, 1.0, InMemory(codec_named("F32"), [values.view(np.uint8)]).read)


def codec_operations(short: str, name: str, values: Flat) -> Iterator[Operation]:
    """Encoding and decoding of 16 Mi values."""
    codec = codec_named(name)
    parts = [np.zeros(part.nbytes, np.uint8) for part in codec.parts(values.size)]
    back = np.empty_like(values)
    codec.encode(values, parts)
    yield Operation(f"encode_{short}", values.size, values.nbytes, lambda: codec.encode(values, parts))
    yield Operation(f"decode_{short}", values.size, values.nbytes, lambda: codec.decode(parts, 0, values.size, back))


def compression_operations(values: Flat) -> Iterator[Operation]:
    """Byte planes and zstd over the bf16 payload of 32 Mi values."""
    codec = codec_named("BF16")
    parts = [np.zeros(part.nbytes, np.uint8) for part in codec.parts(values.size)]
    codec.encode(values, parts)
    plain = parts[0]
    packed = compress(plain.data, 2)
    restored = decompress(packed, plain.nbytes)
    if isinstance(restored, Malformed) or restored != plain.data:
        raise SystemExit("What was compressed did not come back.")
    ratio = len(packed) / plain.nbytes
    yield Operation("shuffle_zstd", values.size, plain.nbytes, lambda: compress(plain.data, 2), ratio)
    yield Operation("unshuffle_zstd", values.size, plain.nbytes, lambda: decompress(packed, plain.nbytes), ratio)


def operations() -> Iterator[Operation]:
    """All operations, each made when it is its turn, so memory holds one at a time."""
    yield outer_operation()
    yield merge_operation()
    values = deltas(16 * MI, 0)
    for short, name in CODECS.items():
        yield from codec_operations(short, name, values)
    yield from compression_operations(deltas(32 * MI, 0))


def measured(operation: Operation, rounds: int) -> Row:
    """Medians of the operation and of a copy of as many fp32 values, taken in turns."""
    source, target = np.ones(operation.elements, np.float32), np.zeros(operation.elements, np.float32)
    copies, runs = [], []
    operation.run()
    np.copyto(target, source)
    for _ in range(rounds):
        copies.append(_seconds(lambda: np.copyto(target, source)))
        runs.append(_seconds(operation.run))
    seconds, copy = statistics.median(runs), statistics.median(copies)
    return Row(operation.name, seconds, seconds / copy, operation.counted_bytes / seconds / 1e9, operation.compressed)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the rows where ``--json`` says."""
    parser = argparse.ArgumentParser(description="Throughput of the arithmetic beside one memory copy.")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--rounds", type=int, default=7, help="times each operation and copy is taken (default 7)")
    options = parser.parse_args(arguments)
    print(f"{thread_count()} threads, numpy {np.__version__}, load {os.getloadavg()[0]:.1f}")
    print(f"{'operation':<16}{'seconds':>10}{'x copy':>9}{'GB/s':>8}{'size':>8}   target")
    rows = []
    for operation in operations():
        row = measured(operation, options.rounds)
        text, reached = row.target()
        size = "" if row.compressed is None else f"{row.compressed:.3f}"
        verdict = f"{text}{'' if reached else '   MISSED'}"
        print(f"{row.name:<16}{row.seconds:>10.4f}{row.copy_ratio:>9.2f}{row.gb_per_s:>8.2f}{size:>8}   {verdict}")
        rows.append(row.fields())
    if options.json:
        options.json.write_text(json.dumps({"threads": thread_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
