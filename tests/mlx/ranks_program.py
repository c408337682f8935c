"""One rank of a node of two MLX processes: ``python -m tests.mlx.ranks_program '{"kind": ..., ...}'`` under ring.

``mirror`` lets rank 0 write, reset and fail; ``train`` runs ``gradientmail_mlx.train`` with data parallelism,
once in order and once with a session that fails.
Each rank writes what it came to hold to ``{out}/{rank}.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from gradientmail_core.adapters.mlx import MlxModel
from gradientmail_core.adapters.mlx_distributed import MlxRanks
from gradientmail_core.errors import SessionFailed
from tests.sessions import whole


def mirrored(ranks: MlxRanks, model: MlxModel) -> dict[str, Any]:
    """What each rank holds after rank 0 wrote, was told to reset, and failed."""
    optimizer = optim.Adam(0.1)
    model.track_optimizer(optimizer)
    optimizer.update(model.module, model.module.trainable_parameters())
    found: dict[str, Any] = {"total": ranks.total(3 + (not ranks.leads))}
    values = np.arange(model.schema.elements, dtype=np.float32)
    values[0] = -0.0

    def work() -> int:
        model.write(whole(model), values)
        model.reset_optimizer()
        return 7

    found["result"] = ranks.run(work)
    found["step"] = optimizer.state["step"].item()
    found["idle"] = ranks.run(lambda: 2**40)
    try:
        ranks.run(lambda: 1 // 0)
    except (ZeroDivisionError, SessionFailed) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    out = np.empty(model.schema.elements, np.float32)
    model.read(whole(model), out)
    return {**found, "values": out.tolist(), "negative_zero": bool(np.signbit(out[0]))}


def trained(out: Path, mailbox: str, *, refuse: bool = False) -> dict[str, Any]:
    """The parameters at the end, the rows that this rank saw, and how often the session stepped."""
    from mlx_lm.tuner import trainer as stock

    import gradientmail_core as gm
    from gradientmail_mlx import train
    from tests.mlx.nodes import Node, Reports, Seen, counting, tiny_llama

    rank = mx.distributed.init().rank()
    mx.disable_compile()
    node, seen = Node(out, 8, model=tiny_llama(rank)), Seen(stock.iterate_batches)
    np.random.seed(rank)
    failed, reports = "", Reports()
    session = gm.Session(
        node.model,
        mailbox=mailbox,
        algorithm=gm.DiLoCo(sync_every=4, fragments=2, overlap_steps=0, follow=False, global_batch_size=6),
    )
    if refuse and rank == 0:
        session.step = lambda samples=1: bool(1 // 0)  # type: ignore[method-assign]  # to fail on purpose
    try:
        given: dict[str, Any] = {"args": node.args, "iterate_batches": seen, "training_callback": reports}
        train(node.model, node.optimizer, counting(), counting(8), **given, session=session, evaluate="global")
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    parameters = {name: array.flatten().tolist() for name, array in node.tensors.items()}
    return {
        "parameters": parameters,
        "rows": seen.rows,
        "error": failed,
        "validated": [report["val_loss"] for report in reports.val],
        "steps": session.global_step,
    }


def main() -> None:
    """Do what ``kind`` says."""
    options = json.loads(sys.argv[1])
    group = mx.distributed.init(strict=True, backend="ring")
    if options["kind"] == "mirror":
        mx.random.seed(group.rank())
        module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        module.layers[1].set_dtype(mx.bfloat16)
        model = MlxModel(module)
        result = mirrored(MlxRanks(model, group), model)
    else:
        out = Path(options["out"])
        result = {"good": trained(out, options["mailbox"]), "bad": trained(out, options["mailbox"], refuse=True)}
    Path(options["out"], f"{group.rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
