"""A node of two ranks as a program: ``torchrun --nproc-per-node 2 -m tests.hf.node_program '{"node": "a", ...}'``.

``kind`` is ``ddp`` or ``fsdp2``; the data are ``streamed``, or of a known length. When training ends, every rank
writes the rows it read and its parameters, whole and under their names in the bare model, to
``{out}/{node}-{rank}.json``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_hf import GradientMailCallback
from tests.hf.nodes import Reading, Stream, arguments, llama, rows


def full_values(model: torch.nn.Module) -> dict[str, list[float]]:
    """Every parameter, gathered from all ranks, by name."""
    gathered = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.named_parameters()
    }
    return {name: value.detach().double().flatten().tolist() for name, value in gathered.items()}


def sharded(model: Any) -> Any:
    """``model`` cut over both ranks, as transformers leaves one that it loads in parts."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model._is_distributed_loading_by_transformers = True
    return model


def main() -> None:
    """Train, and write down what came of it."""
    options = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    algorithm = DiLoCo(
        sync_every=4,
        fragments=2,
        overlap_steps=0,
        quorum_size=options["nodes"],
        follow=False,
        delta_codec="F32",
        global_batch_size=options.get("global_batch_size"),
    )
    callback = GradientMailCallback(
        options["mailbox"], algorithm, node=options["node"], min_nodes=options["nodes"], evaluate="global"
    )
    settings = {"max_steps": options["steps"], "ddp_backend": "gloo", "seed": options.get("seed", 42)}
    evaluation = {"eval_strategy": "steps", "eval_steps": 5} if options.get("evaluated") else {}
    args = arguments(options["out"], **settings, **evaluation)
    assert args.parallel_mode.value == "distributed"  # which begins the process group
    model = sharded(llama()) if options["kind"] == "fsdp2" else llama(options.get("seed", 1))
    failures: dict[int, BaseException] = {}
    if rank == options.get("fail_rank"):
        failures[2] = ZeroDivisionError("this rank fails")
    data = Stream() if options.get("streamed") else rows(64)
    made = Reading(
        model=model, args=args, train_dataset=data, eval_dataset=rows(8), callbacks=[callback], failures=failures
    )
    made.train()
    values = full_values(model)
    Path(options["out"], f"{options['node']}-{rank}.json").write_text(json.dumps({"values": values, "read": made.read}))
    print(f"rank {rank} of {options['node']} done")


if __name__ == "__main__":
    main()
