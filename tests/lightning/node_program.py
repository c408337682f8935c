"""One node of a run as a program of its own: ``python -m tests.lightning.node_program '{"node": "a", ...}'``.

``kind`` is ``single``, ``ddp`` or ``fsdp2`` (two ranks each). When training ends, every rank writes its
parameters to ``{out}/{node}-{rank}.json``, whole and under their names in the bare model, with the size of each batch
it trained on. A node that evaluates writes what it first saw to ``{out}/{node}-{rank}-evaluated.json``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from gradientmail_core.adapters.torch_queue import SharedQueueDataset
from gradientmail_core.algorithms.diloco import DiLoCo
from tests.lightning.nodes import QUIET, batches, namespace

FEATURES = 3


def bare_model() -> nn.Module:
    """What all nodes train, whatever they wrap it in."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


def full_values(model: nn.Module) -> dict[str, list[float]]:
    """Every parameter, gathered from all ranks, by name."""
    gathered = {
        name.replace("_orig_mod.", ""): value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.named_parameters()
    }
    return {name: value.detach().double().flatten().tolist() for name, value in gathered.items()}


def module_for(pl: Any, options: dict[str, Any]) -> Any:
    """The Lightning module, sharded or compiled as asked."""

    class Trained(pl.Module):
        sizes: ClassVar[list[int]] = []

        def on_validation_start(self) -> None:
            values = full_values(self.net)
            path = Path(options["out"], f"{options['node']}-{self.global_rank}-evaluated.json")
            if not self.trainer.sanity_checking and not path.exists():
                path.write_text(json.dumps(values))

        def configure_model(self) -> None:
            if options["kind"] == "fsdp2":
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.sizes.append(len(batch[0]))
            if options.get("fail_rank") == self.global_rank and batch_idx == 2:
                raise ZeroDivisionError("this rank fails")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            """Stop where the run is, not this node: one that joined late has taken fewer steps."""
            strategy = self.trainer.strategy
            self.trainer.should_stop = strategy.broadcast(strategy.progress().get("global_step", 0) >= options["steps"])

        def on_fit_end(self) -> None:
            path = Path(options["out"], f"{options['node']}-{self.global_rank}.json")
            path.write_text(json.dumps({**full_values(self.net), "sizes": self.sizes}))

    module = Trained()
    module.net = bare_model()
    if options.get("compiled"):
        module.net = torch.compile(module.net, backend="eager")
    return module


def main() -> None:
    """Train, and write down what came of it."""
    options = json.loads(sys.argv[1])
    pl = namespace(options.get("namespace", "lightning.pytorch"))
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "single": (pl.gm.GradientMailStrategy, {}),
        "ddp": (pl.gm.GradientMailDDPStrategy, {"process_group_backend": "gloo"}),
        "fsdp2": (
            pl.gm.GradientMailModelParallelStrategy,
            {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"},
        ),
    }
    kind, stock = kinds[options["kind"]]
    algorithm = DiLoCo(
        sync_every=4,
        fragments=2,
        overlap_steps=0,
        quorum_size=options["nodes"],
        follow=False,
        delta_codec="F32",
        global_batch_size=options.get("global_batch_size"),
    )
    strategy = kind(
        mailbox=options["mailbox"],
        algorithm=algorithm,
        node=options["node"],
        min_nodes=options["nodes"],
        evaluate="global",
        **stock,
    )
    torch.manual_seed(options.get("seed", 1))
    devices = 1 if options["kind"] == "single" else 2
    limits = (
        {"val_check_interval": 10, "limit_val_batches": 1} if options.get("evaluates") else {"limit_val_batches": 0}
    )
    trainer = pl.pl.Trainer(strategy=strategy, **{**QUIET, "devices": devices}, **limits, max_epochs=-1)
    train = batches(32, shuffle=True)
    if options.get("shared"):
        train = DataLoader(SharedQueueDataset(train.dataset), batch_size=4, shuffle=True)
    trainer.fit(module_for(pl, options), train, batches(2))
    print(f"rank {trainer.global_rank} of {options['node']} done", os.getpid(), flush=True)
    os._exit(0)  # taking the interpreter down piece by piece takes longer than the training


if __name__ == "__main__":
    main()
